"""A sum of dense gradients in fewer bytes with the same bits: exponents are coded, and zeros have no mantissa.

Neighbours in a gradient have similar exponents: 3 to 4 of 8 bits are information, and zlib's Huffman codes find them.
Mantissas are noise and are sent as they are. Packets differ in length from rank to rank, and an exchange has one length
for all ranks, so a first exchange of 8 bytes finds the longest.

    compression: {tower: "shardkeep.examples.compression.lossless:Lossless"}
"""

# N = values, M = values that are not zero, W = ranks, H = packets of this rank, R = bytes of a packet

import zlib

import numpy as np
import torch

from shardkeep.compression.tower.exchange import Exchange, packet_of
from shardkeep.compression.tower.formats import FP32, Rounded
from shardkeep.errors import CorruptMessage

LEVEL, RAW_DEFLATE, MEMORY = 1, -15, 7
"""Of zlib: no header or checksum, and 8,192 symbols per Huffman code, because layers differ."""
MANTISSA, SIGN = 0x7FFFFF, 1 << 23
LENGTH_BYTES = 5


class Lossless:
    """Sums in fp32, in rank order, as `none` does. Every packet of that sum is sent coded."""

    def __init__(self, shapes, memory):
        self.plain = Rounded(shapes, FP32)

    def sum(self, names, grads, ranks):
        total = self.plain.sum(names, grads, ranks)
        exchange = next(total)
        while True:
            received = yield from exchanged(exchange.packets)
            try:
                exchange = total.send(received)
            except StopIteration as done:
                return done.value


def exchanged(packets):
    """Exchanges packets of float32 values, uint8 (R,) or (W, R), as codes. Returns what arrives, (W, R)."""
    num_values, device = packets.shape[-1] // 4, packets.device
    codes_H = [encode_floats(packet) for packet in np.atleast_2d(packets.cpu().numpy())]
    length = torch.from_numpy(encode_length(max(map(len, codes_H)))).to(device)
    lengths_W8 = yield Exchange(length, {"framing": length.nbytes})
    width = 0
    for rank, length_8 in enumerate(lengths_W8.cpu().numpy()):
        with packet_of(rank):
            width = max(width, decode_length(length_8, num_values))
    padded_HR = np.zeros((len(codes_H), width), np.uint8)
    for row_R, code in zip(padded_HR, codes_H, strict=True):
        row_R[: len(code)] = code
    codes_WR = yield Exchange(torch.from_numpy(padded_HR).view(*packets.shape[:-1], width).to(device))
    floats_WR = torch.empty((len(codes_WR), 4 * num_values), dtype=torch.uint8)
    for rank, (row_R, code) in enumerate(zip(floats_WR.numpy(), codes_WR.cpu().numpy(), strict=True)):
        with packet_of(rank):
            row_R[:] = decode_floats(code, num_values)
    return floats_WR.to(device)


def encode_length(length):
    """A length and three bytes of its checksum, (8,). If one rank misread it, packets would differ in size."""
    plain = length.to_bytes(LENGTH_BYTES, "little")
    check = zlib.crc32(plain).to_bytes(4, "little")[: 8 - LENGTH_BYTES]
    return np.frombuffer(plain + check, np.uint8).copy()


def decode_length(packet, num_values):
    """Raises CorruptMessage for a damaged length, or one that no code of so many values has."""
    length = int.from_bytes(packet[:LENGTH_BYTES].tobytes(), "little")
    deflated = num_values + (num_values + 7) // 8  # stored as it is, in blocks of at least 8,192 bytes
    longest = deflated + 5 * (1 + deflated // 8192) + 8 + 3 * num_values
    if length > longest or not np.array_equal(encode_length(length), packet):
        raise CorruptMessage(f"a code of {length:,} bytes came for {num_values:,} float32s, or its length is damaged")
    return length


def encode_floats(values):
    """The code of N float32 values, given as bytes: exponents and, for each that is 0, a bit that marks a nonzero
    rest, deflated; then mantissa and sign of the M values that are not zero, two bytes of each and then the third."""
    bits_N = values.view(np.uint32)
    exponents_N = (bits_N >> 23).astype(np.uint8)  # without the sign, which is the next bit
    rests_N = bits_N & MANTISSA | bits_N >> 8 & SIGN
    nonzero_N = rests_N != 0
    deflate = zlib.compressobj(LEVEL, zlib.DEFLATED, RAW_DEFLATE, MEMORY, zlib.Z_RLE)
    flags = np.packbits(nonzero_N[exponents_N == 0])
    deflated = deflate.compress(exponents_N.tobytes() + flags.tobytes()) + deflate.flush()
    rests_M = rests_N[nonzero_N | (exponents_N != 0)]
    low_M, high_M = rests_M.astype(np.uint16), (rests_M >> 16).astype(np.uint8)
    return np.concatenate([np.frombuffer(deflated, np.uint8), low_M.view(np.uint8), high_M])


def decode_floats(code, num_values):
    """The bytes of the values; what follows their code is ignored. Raises CorruptMessage for a code that is none."""
    inflate = zlib.decompressobj(RAW_DEFLATE)
    try:
        plain = inflate.decompress(code.tobytes(), num_values + (num_values + 7) // 8 + 1)
    except zlib.error as error:
        raise CorruptMessage(f"{len(code)} bytes are no coded float32s: {error}") from error
    exponents_N, flags = np.split(np.frombuffer(plain, np.uint8), [num_values])
    nonzero_N = exponents_N != 0
    num_flags = num_values - int(np.count_nonzero(nonzero_N))
    if not inflate.eof or len(exponents_N) != num_values or len(flags) != (num_flags + 7) // 8:
        raise CorruptMessage(f"{len(code)} bytes are not {num_values} coded float32s")
    nonzero_N[~nonzero_N] = np.unpackbits(flags, count=num_flags)
    num_rests, rests = int(np.count_nonzero(nonzero_N)), inflate.unused_data
    if len(rests) < 3 * num_rests:
        raise CorruptMessage(f"{len(code)} bytes are too few for {num_values} coded float32s")
    rests_M = np.frombuffer(rests, np.uint8, num_rests, 2 * num_rests).astype(np.uint32) << 16
    rests_M |= np.frombuffer(rests, np.uint16, num_rests)
    bits_N = exponents_N.astype(np.uint32) << 23
    bits_N[nonzero_N] |= rests_M & MANTISSA | (rests_M & SIGN) << 8
    return bits_N.view(np.uint8)
