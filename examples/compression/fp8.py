"""8-bit floats, e4m3, with a scale per row (FP8-LM, Peng et al., 2023).

compression: {pull: {values: "shardkeep.examples.compression.fp8:Fp8"}}
"""

import numpy as np
import torch

from shardkeep.compression.values.codec import RowCodec

LARGEST = 448.0  # of e4m3


class Fp8(RowCodec):
    """A row is its scale, float32, and then a byte per value. The largest magnitude of a row becomes 448."""

    def row_bytes(self, dim):
        return 4 + dim

    def encode(self, rows_KD, draws):
        scales_K1 = np.abs(rows_KD).max(axis=1, keepdims=True, initial=0.0) / np.float32(LARGEST)
        scales_K1 = np.maximum(scales_K1, np.float32(2.0**-126)).astype("<f4")  # also of zeros; NaN stays
        with np.errstate(all="ignore"):  # rows that are not finite
            scaled_KD = np.clip(rows_KD / scales_K1, -LARGEST, LARGEST)
        scales_K1[~np.isfinite(rows_KD).all(axis=1)] = np.nan
        codes_KD = torch.from_numpy(scaled_KD).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        return np.hstack([scales_K1.view(np.uint8), codes_KD])

    def decode(self, encoded_KR, dim):
        codes_KD = torch.from_numpy(encoded_KR[:, 4:].copy()).view(torch.float8_e4m3fn).to(torch.float32).numpy()
        with np.errstate(all="ignore"):  # any bytes decode to something
            return codes_KD * encoded_KR[:, :4].copy().view("<f4")

    def parts(self, packet, num_rows, dim):
        return {"scales": 4 * num_rows}
