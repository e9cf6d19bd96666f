"""Few levels with random rounding, so that the mean over many steps is exact (QSGD, Alistarh et al., NeurIPS 2017).

compression: {push: {values: {name: "shardkeep.examples.compression.qsgd:Qsgd", options: {levels: 3, norm: max}}}}
"""

import numpy as np

from shardkeep.compression.values.codec import RowCodec


class Qsgd(RowCodec):
    """A row is its norm, float32, and then its levels from -s to s, in as few bits as they need.

    Args:
        levels: s; a value becomes one of the two multiples of norm / s around it, with itself as the mean.
        norm: "l2" as in the paper, or "max", which wastes no level.
    """

    def __init__(self, levels=7, norm="max"):
        if levels < 1 or norm not in ("l2", "max"):
            raise ValueError(f"levels: {levels}, norm: {norm}; allowed: levels of at least 1, norm l2 or max")
        self.levels, self.norm = levels, norm
        self.width = (2 * levels).bit_length()

    def row_bytes(self, dim):
        return 4 + (dim * self.width + 7) // 8

    def encode(self, rows_KD, draws):
        dim = rows_KD.shape[1]
        with np.errstate(all="ignore"):  # rows that are not finite
            norms_K = np.linalg.norm(rows_KD.astype(np.float64), ord=None if self.norm == "l2" else np.inf, axis=1)
            sizes_KD = np.abs(rows_KD) / np.where(norms_K > 0, norms_K, 1)[:, None] * self.levels
            levels_KD = np.floor(np.nan_to_num(sizes_KD) + draws.uniform(dim))
        codes_KD = self.levels + np.copysign(np.clip(levels_KD, 0, self.levels), rows_KD)
        bits = codes_KD.astype(np.uint32)[:, :, None] >> np.arange(self.width, dtype=np.uint32) & 1
        packed = np.packbits(bits.astype(np.uint8).reshape(-1, dim * self.width), axis=1)
        norms_K = np.where(np.isfinite(rows_KD).all(axis=1), norms_K, np.nan).astype("<f4")
        return np.hstack([norms_K.reshape(-1, 1).view(np.uint8), packed])

    def decode(self, encoded_KR, dim):
        bits = np.unpackbits(encoded_KR[:, 4:], axis=1, count=dim * self.width).reshape(-1, dim, self.width)
        levels_KD = (bits.astype(np.int64) << np.arange(self.width)).sum(axis=2) - self.levels
        with np.errstate(all="ignore"):  # any bytes decode to something
            return encoded_KR[:, :4].copy().view("<f4") * (levels_KD / self.levels).astype(np.float32)

    def parts(self, packet, num_rows, dim):
        return {"scales": 4 * num_rows}
