"""One bit per value: the sign, times the mean magnitude of the row (signSGD, Bernstein et al., ICML 2018).

compression: {push: {values: "shardkeep.examples.compression.sign:Sign", pool_rows: 200000}}
"""

import numpy as np

from shardkeep.compression.values.codec import RowCodec


class Sign(RowCodec):
    """A row is its mean magnitude, float32, and then the signs, one bit each."""

    def row_bytes(self, dim):
        return 4 + (dim + 7) // 8

    def encode(self, rows_KD, draws):
        scales_K = np.abs(rows_KD).mean(axis=1, dtype=np.float64).astype("<f4")
        signs = np.packbits(np.signbit(rows_KD), axis=1, bitorder="little")
        return np.hstack([scales_K.reshape(-1, 1).view(np.uint8), signs])

    def decode(self, encoded_KR, dim):
        scales_K1 = encoded_KR[:, :4].copy().view("<f4")
        signs_KD = np.unpackbits(encoded_KR[:, 4:], axis=1, count=dim, bitorder="little")
        return np.where(signs_KD, -scales_K1, scales_K1)

    def parts(self, packet, num_rows, dim):
        return {"scales": 4 * num_rows}
