"""int4 whose codes are Huffman-coded: the rows of a table in one message share one code, so the bytes vary.

compression: {push: {values: "shardkeep.examples.compression.huffman:Huffman", pool_rows: 200000}}

A packet is the scales, a byte per row; the length of each of the 16 codes, 4 bits each; and then all codes, row after
row, with up to 7 zeros at the end. Codes are canonical: of equal lengths, they rise with their symbols.
"""

import heapq

import numpy as np

from shardkeep.compression.values.codec import RowCodec
from shardkeep.compression.values.scaled import int4
from shardkeep.errors import CorruptMessage

SYMBOLS, LONGEST, LENGTHS_BYTES = 16, 15, 8


class Huffman(RowCodec):
    """The lossy part is that of `int4`. Only `pack` and `unpack` are new."""

    def __init__(self):
        self.int4 = int4("pow2")

    def row_bytes(self, dim):
        return self.int4.row_bytes(dim)

    def encode(self, rows_KD, draws):
        return self.int4.encode(rows_KD, draws)

    def decode(self, encoded_KR, dim):
        return self.int4.decode(encoded_KR, dim)

    def pack(self, encoded_KR, dim):
        halves = np.stack([encoded_KR[:, 1:] & 15, encoded_KR[:, 1:] >> 4], axis=2)
        symbols_N = halves.reshape(len(encoded_KR), dim + dim % 2)[:, :dim].reshape(-1)
        lengths = lengths_of(np.bincount(symbols_N, minlength=SYMBOLS))
        sizes_N = lengths[symbols_N]
        ends_N = np.cumsum(sizes_N)
        within = np.arange(ends_N[-1] if ends_N.size else 0) - np.repeat(ends_N - sizes_N, sizes_N)
        codes = np.repeat(codes_of(lengths)[symbols_N], sizes_N)
        bits = codes >> (np.repeat(sizes_N, sizes_N) - 1 - within) & 1
        head = lengths[::2] | lengths[1::2] << 4
        return np.concatenate([encoded_KR[:, 0], head.astype(np.uint8), np.packbits(bits.astype(np.uint8))])

    def unpack(self, packet, num_rows, dim):
        start = num_rows + LENGTHS_BYTES
        if packet.size < start:
            raise CorruptMessage(f"{packet.size} bytes of {num_rows} rows; expected {start} and their codes")
        head = packet[num_rows:start].astype(np.int64)
        lengths = np.stack([head & 15, head >> 4], axis=1).reshape(-1)
        symbols_N = read(np.unpackbits(packet[start:]), lengths, num_rows * dim)
        halves = np.zeros((num_rows, dim + dim % 2), np.uint8)
        halves[:, :dim] = symbols_N.reshape(num_rows, dim)
        return np.hstack([packet[:num_rows].reshape(-1, 1), halves[:, ::2] | halves[:, 1::2] << 4])

    def parts(self, packet, num_rows, dim):
        return {"scales": num_rows}


def lengths_of(counts):
    """Bits of each symbol's code, 0 of one that does not occur."""
    lengths = np.zeros(SYMBOLS, np.int64)
    heap = [(int(counts[symbol]), symbol, [symbol]) for symbol in np.flatnonzero(counts).tolist()]
    if len(heap) == 1:
        lengths[heap[0][1]] = 1
    heapq.heapify(heap)
    while len(heap) > 1:
        (first, mark, left), (second, _, right) = heapq.heappop(heap), heapq.heappop(heap)
        lengths[left + right] += 1
        heapq.heappush(heap, (first + second, mark, left + right))
    return lengths


def codes_of(lengths):
    """The canonical code of each symbol."""
    codes, code, before = np.zeros(SYMBOLS, np.int64), 0, 0
    for length, symbol in sorted((int(lengths[symbol]), symbol) for symbol in np.flatnonzero(lengths)):
        code <<= length - before
        codes[symbol], code, before = code, code + 1, length
    return codes


def read(bits, lengths, count):
    """So many symbols. Raises CorruptMessage for bits that are not exactly these."""
    if (2.0 ** -lengths[lengths > 0]).sum() > 1:
        raise CorruptMessage("lengths of no Huffman code")
    symbol_of = np.full(1 << LONGEST, -1)  # by the next 15 bits
    for symbol, code in enumerate(codes_of(lengths).tolist()):
        if length := int(lengths[symbol]):
            symbol_of[code << LONGEST - length : code + 1 << LONGEST - length] = symbol
    padded = np.append(bits, np.zeros(LONGEST, np.uint8)).astype(np.int64)
    windows = sum(padded[j : j + bits.size + 1] << LONGEST - 1 - j for j in range(LONGEST))
    symbols_at = symbol_of[windows]  # what begins at each bit
    steps, found, at = np.append(lengths, 0)[symbols_at].tolist(), np.empty(count, np.int64), 0
    for n in range(count):
        if at >= bits.size:
            raise CorruptMessage(f"{bits.size} bits are too few of {count} codes")
        found[n], at = at, at + steps[at]
    if at > bits.size or bits.size - at > 7 or bits[at:].any() or (symbols_at[found] < 0).any():
        raise CorruptMessage(f"{bits.size} bits are not exactly {count} codes")
    return symbols_at[found].astype(np.uint8)
