"""The tower's gradient in fewer bytes and the same bits: exponents are coded, and zeros have no mantissa.

Neighbours in a gradient have like exponents: 3 to 4 bits of 8 are news, and zlib's Huffman codes find them. Mantissas
are noise and go as they are. Codes differ in length and an exchange has one for all ranks, so a first round of 8 bytes
finds the longest.
"""

# N = values, M = values that are not zero, W = world size, H = packets of this rank, R = bytes of a packet

from __future__ import annotations

import zlib
from collections.abc import Generator, Mapping, Sequence

import numpy as np
import torch

from shardkeep.base.arrays import Bytes
from shardkeep.base.errors import CorruptMessage
from shardkeep.compression.config import TowerCompressionConfig
from shardkeep.compression.tower.exchange import DenseForm, Exchange, Ranks, Sum, packet_of
from shardkeep.compression.tower.formats import FP32
from shardkeep.compression.tower.forms import Rounded, Shape, num_values
from shardkeep.compression.tower.residuals import Residuals

_LEVEL, _RAW_DEFLATE, _MEMORY = 1, -15, 7
"""Of zlib: no header or checksum, and 8,192 symbols to a Huffman code, since layers differ."""
_MANTISSA, _SIGN = 0x7FFFFF, 1 << 23
_LENGTH_BYTES = 5


class Lossless(DenseForm):
    """A sum in fp32 whose packets travel coded. `num_values`: of all parameters, however many are summed together."""

    def __init__(self, num_values: int) -> None:
        self._plain = Rounded(FP32, num_values)

    def sum(self, names: Sequence[str], grads: Sequence[torch.Tensor], ranks: Ranks) -> Sum:
        total = self._plain.sum(names, grads, ranks)
        exchange = next(total)
        while True:
            packets_WR = yield from _exchanged(exchange.packets)
            try:
                exchange = total.send(packets_WR)
            except StopIteration as done:
                result: torch.Tensor = done.value
                return result


def lossless(config: TowerCompressionConfig, shapes: Mapping[str, Shape], residuals: Residuals) -> Lossless:
    return Lossless(num_values(shapes))


def _exchanged(packets: torch.Tensor) -> Generator[Exchange, torch.Tensor, torch.Tensor]:
    """A round of packets of float32s, uint8 (R,) or (W, R), that travel coded; what came, (W, R).

    Raises CorruptMessage, which names the rank."""
    num_values, device = packets.shape[-1] // 4, packets.device
    codes_H = [encode_floats(packet) for packet in np.atleast_2d(packets.cpu().numpy())]
    length = torch.from_numpy(encode_length(max(map(len, codes_H)))).to(device)
    lengths_W8 = yield Exchange(length, {"framing": length.nbytes})
    width = 0
    for rank, length_8 in enumerate(lengths_W8.cpu().numpy()):
        with packet_of(rank):
            width = max(width, decode_length(length_8, num_values))
    filled_HR = np.zeros((len(codes_H), width), np.uint8)
    for room_R, code in zip(filled_HR, codes_H, strict=True):
        room_R[: len(code)] = code
    filled = torch.from_numpy(filled_HR).view(*packets.shape[:-1], width).to(device)
    codes_WR = yield Exchange(filled)
    floats_WR = torch.empty((len(codes_WR), 4 * num_values), dtype=torch.uint8)
    for rank, (room_R, code) in enumerate(zip(floats_WR.numpy(), codes_WR.cpu().numpy(), strict=True)):
        with packet_of(rank):
            room_R[:] = decode_floats(code, num_values)
    return floats_WR.to(device)


def most_bytes(num_values: int) -> int:
    """No code of so many float32s is longer: deflate stores what it cannot shorten, in blocks of at least 8,192."""
    plain = num_values + _flag_bytes(num_values)
    return plain + 5 * (1 + plain // 8192) + 8 + 3 * num_values


def encode_length(length: int) -> Bytes:
    """A code's length and three bytes of its checksum, (8,). Where one rank alone misreads it, packets differ in size,
    and gloo aborts a process."""
    plain = length.to_bytes(_LENGTH_BYTES, "little")
    return np.frombuffer(plain + _check_of(plain), np.uint8).copy()


def decode_length(packet: Bytes, num_values: int) -> int:
    """Raises CorruptMessage for a length that is damaged, or that no code of so many float32s has."""
    plain, check = packet[:_LENGTH_BYTES].tobytes(), packet[_LENGTH_BYTES:].tobytes()
    length = int.from_bytes(plain, "little")
    if check != _check_of(plain) or length > most_bytes(num_values):
        raise CorruptMessage(f"a code of {length:,} bytes came for {num_values:,} float32s, or its length is damaged")
    return length


def _check_of(plain: bytes) -> bytes:
    return zlib.crc32(plain).to_bytes(4, "little")[: 8 - _LENGTH_BYTES]


def encode_floats(values: Bytes) -> Bytes:
    """The code of N float32s, given as their bytes: the exponents, and for each that is 0 a bit that says whether the
    rest is not, deflated; then mantissa and sign of those that are not zero, two bytes of each and then the third."""
    bits_N = values.view(np.uint32)
    exponents_N = (bits_N >> 23).astype(np.uint8)  # without the sign, which is the next bit
    rests_N = bits_N & _MANTISSA | bits_N >> 8 & _SIGN
    some_N = rests_N != 0
    deflate = zlib.compressobj(_LEVEL, zlib.DEFLATED, _RAW_DEFLATE, _MEMORY, zlib.Z_RLE)
    flags = np.packbits(some_N[exponents_N == 0])
    deflated = deflate.compress(exponents_N.tobytes() + flags.tobytes()) + deflate.flush()
    rests_M = rests_N[some_N | (exponents_N != 0)]
    low_M, high_M = rests_M.astype(np.uint16), (rests_M >> 16).astype(np.uint8)
    return np.concatenate([np.frombuffer(deflated, np.uint8), low_M.view(np.uint8), high_M])


def decode_floats(code: Bytes, num_values: int) -> Bytes:
    """The bytes of `num_values` float32s; what comes after their code is not looked at.

    Raises CorruptMessage when it is none, or too short."""
    inflate = zlib.decompressobj(_RAW_DEFLATE)
    try:
        plain = inflate.decompress(code.tobytes(), num_values + _flag_bytes(num_values) + 1)
    except zlib.error as error:
        raise CorruptMessage(f"{len(code)} bytes are no coded float32s: {error}") from error
    exponents_N, flags = np.split(np.frombuffer(plain, np.uint8), [num_values])
    some_N = exponents_N != 0
    num_flags = num_values - int(np.count_nonzero(some_N))
    if not inflate.eof or len(exponents_N) != num_values or len(flags) != _flag_bytes(num_flags):
        raise CorruptMessage(f"{len(code)} bytes are not {num_values} coded float32s")
    some_N[~some_N] = np.unpackbits(flags, count=num_flags)
    num_rests, rests = int(np.count_nonzero(some_N)), inflate.unused_data
    if len(rests) < 3 * num_rests:
        raise CorruptMessage(f"{len(code)} bytes are too few for {num_values} coded float32s")
    high_M = np.frombuffer(rests, np.uint8, num_rests, 2 * num_rests)
    rests_M = np.frombuffer(rests, np.uint16, num_rests) | high_M.astype(np.uint32) << 16
    bits_N = exponents_N.astype(np.uint32) << 23
    bits_N[some_N] |= rests_M & _MANTISSA | (rests_M & _SIGN) << 8
    return bits_N.view(np.uint8)


def _flag_bytes(num_flags: int) -> int:
    return -(-num_flags // 8)
