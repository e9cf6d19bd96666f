"""8-bit floats, e4m3, with a scale per row (FP8-LM, Peng et al., 2023).

compression: {pull: {values: "shardkeep.examples.compression.fp8:Fp8"}}
"""

import numpy as np
import torch

from shardkeep.compression.values.codec import RowCodec

LARGEST = 448.0  # of e4m3


class Fp8(RowCodec):
    """A row is its scale, the exponent of a power of two, and then a byte per value.

    The scale is the smallest at which the largest magnitude of the row is at most 448. Its byte is the exponent of a
    float32; 255 = a row that is not finite.
    """

    def row_bytes(self, dim):
        return 1 + dim

    def encode(self, rows_KD, draws):
        largest_K1 = np.abs(rows_KD).max(axis=1, keepdims=True, initial=0.0) / np.float32(LARGEST)
        halves_K1, exponents_K1 = np.frexp(largest_K1)  # a number is half * 2**exponent, half in [0.5, 1)
        exponents_K1 = np.clip(exponents_K1 - (halves_K1 == 0.5), -126, 127)
        with np.errstate(all="ignore"):  # rows that are not finite
            scaled_KD = np.clip(np.ldexp(rows_KD, -exponents_K1), -LARGEST, LARGEST)
        codes_KD = torch.from_numpy(scaled_KD).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        finite_K1 = np.isfinite(rows_KD).all(axis=1, keepdims=True)
        return np.hstack([np.where(finite_K1, exponents_K1 + 127, 255).astype(np.uint8), codes_KD])

    def decode(self, encoded_KR, dim):
        codes_KD = torch.from_numpy(encoded_KR[:, 1:].copy()).view(torch.float8_e4m3fn).to(torch.float32).numpy()
        scales_K1 = (encoded_KR[:, :1].astype(np.uint32) << 23).view(np.float32)
        with np.errstate(all="ignore"):  # any bytes decode to something
            return codes_KD * scales_K1

    def parts(self, packet, num_rows, dim):
        return {"scales": num_rows}
