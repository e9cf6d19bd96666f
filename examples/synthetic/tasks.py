"""Three labels of which each happens only after the one before it: clicked, bought, and returned.

data:
  source: shardkeep.examples.synthetic.tasks:samples
  options: {rows: 60000, eval_rows: 10000}
  labels: [clicked, {column: bought, after: clicked}, {column: returned, after: bought, missing: mask}]

The columns are those of the source `synthetic`. All three labels share half of what decides them. A fifth of the
samples does not have the last label. The samples are held in memory.
"""

import numpy as np

from shardkeep.examples.synthetic.draws import happens, key_of, mix, stepped, unit
from shardkeep.workers.data.sources.synthetic.source import SyntheticDataset
from shardkeep.workers.data_config import SyntheticConfig
from shardkeep.workers.metrics.quality import auc

LABELS = ("clicked", "bought", "returned")
BIASES = (1.0, 1.0, 1.4)  # of the log-odds where the label before has happened: a half of them happen
SHARED = np.sqrt(0.5)
MASKED = 0.2


def samples(split, rows=60_000, eval_rows=10_000, seed=7, **settings):
    """A job calls it with `split`, "train" and "eval", and the keys of `data.options`.

    `settings`: of `data.synthetic`, such as `table_sizes`."""
    batch, label_BC, _ = _drawn(split, rows if split == "train" else eval_rows, seed, settings)
    dense = {f"I{i + 1}": values_B for i, values_B in enumerate(batch.dense_BI.T)}
    sparse = {name: ragged.values_N for name, ragged in batch.ids.items()}
    return {"labels": dict(zip(LABELS, label_BC.T, strict=True)), "dense": dense, "sparse": sparse}


def best_auc(given=False, eval_rows=10_000, seed=7, **settings):
    """The AUC of the true chance of each label on the evaluation samples that have it, which no model can pass.

    `given`: among the samples where the label before has happened, else among all."""
    _, label_BC, chance_BC = _drawn("eval", eval_rows, seed, settings)
    found = {}
    for c, name in enumerate(LABELS):
        has_B = ~np.isnan(label_BC[:, c]) & ((label_BC[:, c - 1] == 1) if given and c else True)
        score_B = chance_BC[:, c] if given else chance_BC[:, : c + 1].prod(axis=1)
        found[name] = auc(score_B[has_B], label_BC[has_B, c])
    return found


def _drawn(split, rows, seed, settings):
    """Columns, labels and the chance of each label where the one before has happened."""
    config, row_B = SyntheticConfig(**settings), np.arange(rows)
    names, key = key_of("teacher", seed), key_of(split, seed)
    teachers = [names[0] ^ np.uint64(c << 40) for c in range(len(LABELS) + 1)]
    (batch, shared_B), *more = (SyntheticDataset(config, each, key[0], rows).drawn(row_B) for each in teachers)
    own = [logit_B for _, logit_B in more]
    logit_BC = SHARED * (shared_B[:, None] + np.stack(own, axis=1)) + np.array(BIASES)
    key_B = mix(key ^ mix(row_B.astype(np.uint64) ^ np.uint64(0xA0761D6478BD642F)))
    drawn = [happens(stepped(key_B, c + 1), logit_BC[:, c]) for c in range(len(LABELS))]
    label_BC = np.cumprod(np.stack(drawn, axis=1), axis=1).astype(np.float64)
    label_BC[unit(key_B) < MASKED, -1] = np.nan
    return batch, label_BC, 1.0 / (1.0 + np.exp(-logit_BC))
