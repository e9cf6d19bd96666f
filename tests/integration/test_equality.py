"""A distributed run equals a single-process one: step by step against plain PyTorch, bit by bit among itself."""

from __future__ import annotations

import numpy as np
import yaml

from shardkeep.compression.recipes import RECIPES
from shardkeep.config import JobConfig, parse_config
from shardkeep.ps.placement import server_of
from shardkeep.workers.data.batch import Batch, Ragged
from tests.support.cases import every
from tests.support.local_job import LocalJob, in_threads
from tests.support.one_table import pulled
from tests.support.reference import Reference
from tests.support.samples import ArrayDataset, as_data, draw

OPTIMIZERS = {
    "sgd": "{name: sgd, lr: 0.1}",
    "adagrad": "{name: adagrad, lr: 0.05}",
    "rowwise_adagrad": "{name: rowwise_adagrad, lr: 0.05}",
    "adam": "{name: adam, lr: 0.01}",
    "ftrl": "{name: ftrl, lr: 1.0, l1: 0.0001, l2: 0.001}",
}


def job_config(
    servers: int, workers: int, optimizer: str = "rowwise_adagrad", tower: str = "sgd", **more: object
) -> JobConfig:
    settings = [f"{key}={value}" for key, value in more.items()]
    return parse_config(
        f"""
        seed: 3
        servers: {servers}
        workers: {workers}
        consistency: {{mode: sync}}
        model: {{name: dlrm, bottom: [8], hidden: [8]}}
        tables: {{default: {{dim: 4, optimizer: {OPTIMIZERS[optimizer]}}}, b: {{dim: 6}}}}
        tower: {{compile: off, amp: off, optimizer: {{name: {tower}, lr: 0.01}}}}
        train: {{batch_size: 8}}
        """,
        [key.replace("__", ".") for key in settings],
    )


class SideBySide:
    """A local job and the reference; each step starts both from the reference's state."""

    def __init__(self, config: JobConfig, data: ArrayDataset) -> None:
        self.job = LocalJob(config, as_data(data))
        self.data = data
        worker = self.job.workers[0]
        features = data.schema.features
        everything = data.gather(np.arange(len(data)))
        vocabulary = {
            table: np.unique(np.concatenate([everything.ids[f.name].values_N for f in features if f.table == table]))
            for table in data.schema.tables()
        }
        self.index = {name: i for i, name in enumerate(data.schema.tables())}
        initial = {name: self._pull(name, ids) for name, ids in vocabulary.items()}
        self.reference = Reference(
            data.schema, worker.client.tables, vocabulary, initial, worker.tower.model, config.tower.optimizer
        )

    def _pull(self, name: str, ids: np.ndarray) -> np.ndarray:
        owners = server_of(ids, len(self.job.services))
        rows = np.empty((ids.size, self.job.services[0].tables[self.index[name]].spec.dim), np.float32)
        for s, service in enumerate(self.job.services):
            rows[owners == s] = pulled(service.tables[self.index[name]], ids[owners == s])
        return rows

    def copy_reference(self) -> None:
        """Gives servers and towers the reference's state."""
        for name, ids in self.reference.vocabulary.items():
            owners = server_of(ids, len(self.job.services))
            rows, slots = self.reference.rows(name), self.reference.slots(name)
            for s, service in enumerate(self.job.services):
                mine = owners == s
                service.tables[self.index[name]].load(ids[mine], rows[mine], slots[mine])
        for worker in self.job.workers:
            state = worker.tower.state_dict()
            state["model"] = self.reference.tower.state_dict()
            state["optimizer"] = self.reference.tower_optimizer.state_dict()
            worker.tower.load_state_dict(state)

    def step(self, step: int) -> tuple[float, float]:
        """One step of both: the largest relative errors of a table's and of the tower's update."""
        self.copy_reference()
        before = {name: self.reference.rows(name) for name in self.reference.vocabulary}
        tower_before = flat(self.reference.tower)
        in_threads([lambda w=w: self._train(w, step) for w in self.job.workers])
        self.reference.step(self.joined(step))
        table_error = max(
            relative(self._pull(name, ids) - before[name], self.reference.rows(name) - before[name], before[name])
            for name, ids in self.reference.vocabulary.items()
        )
        expected = flat(self.reference.tower) - tower_before
        tower_error = max(
            relative(flat(w.tower.model) - tower_before, expected, tower_before) for w in self.job.workers
        )
        return table_error, tower_error

    @staticmethod
    def _train(worker, step: int) -> None:
        prepared = worker.trainer.step.pipeline.prepare(step)
        worker.trainer.step.run(prepared, worker.client.pull(step, prepared.request))
        worker.client.fence(step + 1)

    def joined(self, step: int) -> Batch:
        slices = self.job.workers[0].trainer.step.pipeline.slices
        rows = np.concatenate([slices.rows(step, r) for r in range(len(self.job.workers))])
        assert rows.size == slices.samples(step)
        return self.data.gather(rows)


def flat(model) -> np.ndarray:
    return np.concatenate([p.detach().numpy().reshape(-1).copy() for p in model.parameters()])


def relative(ours: np.ndarray, expected: np.ndarray, before: np.ndarray) -> float:
    """Norm of the updates' difference over the norm of the expected update, beyond one last bit of each weight.

    Updates are differences of float32 weights, so the rounding of the weight itself is in them."""
    last_bits = np.linalg.norm(np.spacing(np.abs(before) + np.abs(expected)).astype(np.float64))
    difference = np.linalg.norm((ours - expected).astype(np.float64))
    return float(max(difference - last_bits, 0.0) / np.linalg.norm(expected.astype(np.float64)))


POOLED = dict(zip(OPTIMIZERS, ("sum", "max", "mean", "weighted", "mean"), strict=True))


@every(("optimizer", "pooling"), POOLED.items())
def test_each_step_of_one_worker_is_the_plain_pytorch_step(optimizer: str, pooling: str) -> None:
    both = SideBySide(job_config(1, 1, optimizer), draw(64, pooling=pooling))
    errors = [both.step(step) for step in range(8)]
    assert max(table for table, _ in errors) < 1e-6
    assert max(tower for _, tower in errors) < 1e-6


@every(("optimizer", "workers"), zip(OPTIMIZERS, (2, 3, 2, 3, 2), strict=True))
def test_steps_of_several_workers_are_the_plain_step_on_the_joined_ragged_batch(optimizer: str, workers: int) -> None:
    # 75 samples: the last step of an epoch is ragged, and with 3 workers (24 a step) it leaves 1 sample each.
    data = draw(workers * 24 + workers // 2 + 2, pooling="mean")
    both = SideBySide(job_config(2, workers, optimizer), data)
    errors = [both.step(step) for step in range(both.job.workers[0].trainer.total_steps)]
    assert max(table for table, _ in errors) < 1e-5
    assert max(tower for _, tower in errors) < 1e-5


def test_a_step_in_which_a_worker_has_no_samples_is_the_plain_step_too() -> None:
    data = draw(3 * 8 + 1)
    both = SideBySide(job_config(2, 3, "adam", "adam"), data)
    assert both.job.workers[0].trainer.step.pipeline.slices.rank_samples(1, 2) == 0
    errors = [both.step(step) for step in range(2)]
    assert max(max(pair) for pair in errors) < 1e-5


def test_accumulated_micro_batches_are_one_step_on_all_of_them() -> None:
    both = SideBySide(job_config(2, 2, "adagrad", train__accumulate=3), draw(130))
    errors = [both.step(step) for step in range(both.job.workers[0].trainer.total_steps)]
    assert max(max(pair) for pair in errors) < 1e-5


def test_a_free_run_agrees_with_the_plain_loop_in_loss() -> None:
    config, data = job_config(2, 1, "sgd", "adam", train__epochs=5), draw(80, pooling="mean")
    both = SideBySide(config, data)
    losses = []
    for step in range(50):
        (worker,) = both.job.workers
        prepared = worker.trainer.step.pipeline.prepare(step)
        ours = worker.trainer.step.run(prepared, worker.client.pull(step, prepared.request)).loss
        losses.append((float(ours), both.reference.step(both.joined(step))))
    assert max(abs(a - b) for a, b in losses) < 1e-3
    assert np.mean(losses[-10:]) < np.mean(losses[:10])


@every("workers", [1, 3])
def test_the_digest_does_not_depend_on_the_number_of_servers(workers: int) -> None:
    data = as_data(draw(50, pooling="mean"), draw(30, seed=1, pooling="mean"))
    summaries = [LocalJob(job_config(servers, workers, eval__every_steps=3), data).run() for servers in (1, 3)]
    assert len({s["state_digest"] for s in summaries}) == 1
    assert len({s["eval"]["auc"] for s in summaries}) == 1
    assert all(s["staleness"] == {"0": s["steps"] * workers} for s in summaries)


def test_the_lossless_recipe_has_the_bits_of_fp32_and_sends_less() -> None:
    data, found = as_data(draw(100, pooling="mean")), []
    for name in ("fp32", "lossless"):
        compression = yaml.safe_dump(RECIPES[name].settings["compression"], default_flow_style=True)
        found.append(LocalJob(job_config(2, 3, "adam", "adam", compression=compression), data).run())
    plain, coded = found
    assert coded["state_digest"] == plain["state_digest"]
    assert sum(coded["bytes"]["push"].values()) < sum(plain["bytes"]["push"].values())


def test_the_digest_changes_with_the_seed_and_with_one_more_step() -> None:
    data = as_data(draw(50))
    digests = {
        LocalJob(job_config(1, 1, **more), data).run()["state_digest"]
        for more in ({}, {"seed": 4}, {"train__max_steps": 5}, {"tables__b__dim": 5})
    }
    assert len(digests) == 4


def test_the_reference_would_notice_a_lost_duplicate() -> None:
    """The comparison itself can fail: a batch whose duplicates are dropped is another step."""
    both = SideBySide(job_config(1, 1, "sgd"), draw(80))
    joined = both.joined

    def without_duplicates(step: int) -> Batch:
        batch = joined(step)
        first = batch.ids["b"]
        ids = dict(batch.ids) | {"b": Ragged(first.values_N[:0], np.zeros(len(batch), np.int32))}
        return Batch(batch.dense_BI, ids, batch.label_BT)

    both.joined = without_duplicates  # type: ignore[method-assign]
    assert max(both.step(0)) > 1e-3
