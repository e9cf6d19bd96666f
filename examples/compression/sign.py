"""One bit per value: the sign, times the mean magnitude of the row (signSGD, Bernstein et al., ICML 2018).

compression: {push: {values: "shardkeep.examples.compression.sign:Sign", pool_rows: 200000}}
"""

import numpy as np

from shardkeep.compression.values.codec import RowCodec


class Sign(RowCodec):
    """A row is its mean magnitude, as the exponent of the nearest power of two, and then the signs, one bit each.

    The exponent is that of a float32, one byte: 0 = a row of zeros, 255 = a row that is not finite.
    """

    def row_bytes(self, dim):
        return 1 + (dim + 7) // 8

    def encode(self, rows_KD, draws):
        means_K = np.abs(rows_KD).mean(axis=1, dtype=np.float64).astype(np.float32)
        exponents_K = (means_K.view(np.uint32) + 0x400000) >> 23
        exponents_K = np.where(np.isfinite(means_K), np.minimum(exponents_K, 254), 255)
        exponents_K = np.where(means_K > 0, np.maximum(exponents_K, 1), exponents_K)
        signs = np.packbits(np.signbit(rows_KD), axis=1, bitorder="little")
        return np.hstack([exponents_K.astype(np.uint8).reshape(-1, 1), signs])

    def decode(self, encoded_KR, dim):
        scales_K1 = (encoded_KR[:, :1].astype(np.uint32) << 23).view(np.float32)
        signs_KD = np.unpackbits(encoded_KR[:, 1:], axis=1, count=dim, bitorder="little")
        return np.where(signs_KD, -scales_K1, scales_K1)

    def parts(self, packet, num_rows, dim):
        return {"scales": num_rows}
