"""`Summary`: what `shardkeep.train` returns, and the description of every key of summary.json.

Scripts write docs/reference/summary.md from these models. The file itself is written by `src/shardkeep/run/folder.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class _Part(BaseModel):
    """A frozen part of a summary. It keeps keys that another version wrote as they are."""

    model_config = ConfigDict(frozen=True, extra="allow", use_attribute_docstrings=True, protected_namespaces=())


class ScoresOfClasses(_Part):
    """Metrics of labels that are 0 or 1."""

    auc: float | None = None
    """Area under the ROC curve; null = undefined, see `note`."""
    logloss: float | None = None
    """Mean binary cross-entropy, nats per sample."""
    normalized_entropy: float | None = None
    """Log loss divided by the entropy of the base rate; 1 = no better than predicting the average."""
    calibration: float | None = None
    """Predicted positives divided by positives."""
    unweighted_calibration: float | None = None
    """The same without weights, where that is more than a tenth off."""
    gauc: float | None = None
    """Mean AUC of the groups of `eval.group_by`, weighted by their samples."""
    accuracy: float | None = None
    """Share of the samples that are predicted right at `eval.threshold`."""
    precision: float | None = None
    """Share of positives among the samples that are predicted positive."""
    recall: float | None = None
    """Share of the positives that are predicted positive."""


class Errors(_Part):
    """Metrics of labels that are numbers."""

    mse: float | None = None
    """Mean squared error."""
    rmse: float | None = None
    """Its root."""
    mae: float | None = None
    """Mean absolute error."""
    r2: float | None = None
    """1 - mse / variance of the labels; below 0 = worse than their mean."""
    baseline_mse: float | None = None
    """Mean squared error of the mean of the training labels, where labels are numbers."""
    baseline_rmse: float | None = None
    """Its root."""
    baseline_mae: float | None = None
    """Mean absolute error of the mean of the training labels."""


class Evaluation(Errors, ScoresOfClasses):
    """Metrics of an evaluation. With several labels, each metric is a key METRIC/LABEL."""

    calibration_buckets: list[dict[str, float]] | None = None
    """Mean prediction and mean label of ten buckets of equal size, in order of the prediction."""
    samples: int = 0
    """Samples that were scored."""
    weights: float | None = None
    """The sum of their weights, with `data.weight`; then all metrics are weighted."""
    unseen: dict[str, list[int]] | None = None
    """By feature: the number of values whose id has no row, and of all values
    ([values without a row](../guide/predict.md#values-without-a-row))."""
    note: str | None = None
    """Why a metric is undefined."""
    best_auc: float | None = None
    """The best possible AUC, where the data state it: with `synthetic` data, that of the planted model."""


class BestEvaluation(Evaluation):
    """Metrics of the best evaluation by `train.early_stopping.metric`."""

    step: int = 0
    """Steps that were done; `--model best` takes the checkpoint of this step."""


class TestEvaluation(Evaluation):
    """Metrics on the test data (`data.test`, or of `data.split`), scored once after training."""

    step: int = 0
    """Step of the model: the best one with `train.early_stopping`, otherwise the last."""


class Traffic(_Part):
    """Bytes of all workers by direction and part. docs/research/method.md defines them."""

    push: dict[str, int] = {}
    """Row gradients to servers, by part."""
    pull: dict[str, int] = {}
    """Ids to servers and rows back, by part."""
    tower: dict[str, int] = {}
    """Dense gradients between workers, by part."""
    read: dict[str, int] = {}
    """Evaluation, by part."""
    control: int = 0
    """Everything else: control plane, checkpoint calls, agreements between workers."""
    to_servers: int = 0
    """Bytes from workers to servers."""
    from_servers: int = 0
    """Bytes from servers to workers."""
    between_workers: int = 0
    """Bytes between workers."""
    total: int = 0
    """Sum of the five directions."""
    per_sample: float = 0.0
    """Bytes per trained sample, without `read`."""
    fp32: dict[str, int] | None = None
    """Bytes of `push`, `pull` and `tower` if all values were sent as float32."""


class Recovery(_Part):
    """One recovery after a death."""

    time: str = ""
    """Local time at which training resumed."""
    cause: str = ""
    """What happened first, in words."""
    died: tuple[dict[str, Any], ...] = ()
    """Who died: role, index, cause; of a server also the steps that it lost, why, and where its journal ends."""
    generation: int = 0
    """Number of the generation that formed."""
    step: int | None = None
    """Step at which training resumed; null = unknown after a restart of the coordinator."""
    seconds: float = 0.0
    """Seconds without a group."""
    went_back: bool = False
    """Whether the job went back to a checkpoint."""
    lost_steps: int = 0
    """Trained steps whose updates were lost."""
    lost_unsent_rows: int = 0
    """Rows whose residual died with a worker."""


class TableSummary(_Part):
    """One embedding table over all servers."""

    name: str
    """Name of the table."""
    rows: int
    """Rows that exist."""
    bytes: int
    """Allocated memory."""
    load_factor: float | None = None
    """Share of the index's entries that are taken."""
    admitted_rows: int | None = None
    """Ids that became rows; of tables with `admit`."""
    refused_rows: int | None = None
    """Rows of pushes that were dropped because their id was not admitted; of tables with `admit`."""
    candidates: int | None = None
    """Ids that are counted and have no row yet; of tables with `admit.min_count`."""
    evicted_rows: int | None = None
    """Rows that went; of tables with `evict`."""


class ProcessSummary(_Part):
    """One process of the job."""

    role: Literal["coordinator", "server", "worker"]
    """Its role."""
    index: int
    """Its number in its role."""
    peak_rss_bytes: int = 0
    """Most memory that it had in RAM at once, as the system counts it."""
    kernels_s: float | None = None
    """Seconds for compiling or loading kernels."""
    cores: str | None = None
    """Cores on which it may run."""
    control_bytes: int | None = None
    """Server: bytes of its control calls."""
    applied_steps: int | None = None
    """Server: steps that it has applied."""
    compile_s: float | None = None
    """Worker: seconds of `torch.compile`."""
    step_ms: dict[str, float] | None = None
    """Worker: mean milliseconds of a step by part."""
    peak_cuda_bytes: int | None = None
    """Worker on a GPU: `torch.cuda.max_memory_allocated`."""


class Start(_Part):
    """One start of the job: the first one, each resume, and each scale."""

    began: str | None = None
    """Local time."""
    from_step: int = 0
    """Step at which it began."""
    to_step: int = 0
    """Step at which it ended."""
    status: str | None = None
    """How it ended."""
    message: str | None = None
    """Why it failed; absent otherwise."""
    samples: int = 0
    """Samples that it trained."""
    wall_s: float = 0.0
    """Its seconds."""
    samples_per_s: float | None = None
    """Its speed."""
    step_ms: dict[str, float] | None = None
    """Mean milliseconds of a step by part."""
    bytes: Traffic | None = None
    """Its traffic; null = unknown, because it was killed or failed."""


class JobTotals(_Part):
    """The whole job over all its starts."""

    starts: int = 1
    """Number of starts."""
    steps: int = 0
    """Steps of the job."""
    samples: int = 0
    """Samples of the job."""
    wall_s: float = 0.0
    """Seconds of all starts, steps that were trained again included."""
    samples_per_s: float = 0.0
    """Mean speed over the starts, by samples."""
    step_ms: dict[str, float] = {}
    """Mean milliseconds of a step by part, by steps."""
    bytes: Traffic | None = None
    """Sum of the known traffic."""
    bytes_unknown_of_starts: int = 0
    """Starts whose traffic is unknown."""
    recoveries: int = 0
    """Number of recoveries."""


class Summary(_Part):
    """The result of a job: the content of summary.json, with types. Frozen.

    `to_dict()` returns it as summary.json has it. Keys that do not apply to a job are absent there and None here.
    """

    status: Literal["completed", "incomplete", "stopped", "failed", "killed"]
    """How the job ended. Incomplete: all steps are trained, and something that it was to keep is not there."""
    message: str | None = None
    """Why, if it was not completed."""
    stopped_by: str | None = None
    """Why a stopped job was stopped: `SIGTERM`, by a machine or an engine, or what a person did; absent otherwise."""
    symptom: bool | None = None
    """Whether `message` is only what an unknown failure of another process did; absent otherwise."""
    run_dir: Path | None = None
    """Path of the run folder. In Python only: summary.json does not have it."""
    loop: bool | None = None
    """Whether the training loop was the user's own; absent in jobs of `shardkeep train`. `samples` and `eval` are then
    what it reported, 0 and null without a report."""
    steps: int = 0
    """Steps of the job."""
    samples: int = 0
    """Samples of the job."""
    resumed_at: dict[str, int] | None = None
    """`samples` before this start, if the job was resumed."""
    wall_s: float = 0.0
    """Seconds of this start."""
    samples_per_s: float = 0.0
    """Speed of all workers, without the first ten steps, evaluation, checkpoints and compilation."""
    step_ms: dict[str, float] = {}
    """Mean milliseconds of a step by part, over all workers (docs/guide/performance.md)."""
    step_share: dict[str, float] = {}
    """Share of each part in a step (0 to 1), over all workers."""
    cpu_ms: dict[str, float] = {}
    """Mean CPU milliseconds of a step of a `worker` and a `server`, those for which threads of a worker `waited` for a
    core (Linux), and the number of `steps` measured."""
    eval: Evaluation | None = None
    """Metrics of the last evaluation."""
    best: BestEvaluation | None = None
    """Metrics of the best evaluation; absent without `train.early_stopping`."""
    progressive: Evaluation | None = None
    """Metrics of all samples, each scored before training on it; absent without `train.order: time`."""
    test: TestEvaluation | None = None
    """Metrics on the test data; absent without `data.test` or `data.split`."""
    bytes: Traffic = Traffic()
    """Traffic of this start."""
    sockets: dict[str, dict[str, int]] = {}
    """The kernel's counters of the workers' connections, by peer (Linux)."""
    staleness: dict[int, int] = {}
    """Histogram: steps that the rows of a pull lagged behind, and the number of such pulls."""
    ids_per_step: dict[str, Any] | None = None
    """`by_rank`: mean ids of a step of each worker; `largest_over_mean`: of the worker with the most."""
    dropped_rows: int = 0
    """Row gradients that were not finite and not sent."""
    skipped_steps: int = 0
    """Steps without an update of the dense model, because a GradScaler found an infinity."""
    saturated_values: int | None = None
    """Gradient values beyond the range of the push format; absent with fp32."""
    residuals_and_cache: dict[str, float] | None = None
    """What compression kept from the wire, see above; absent without a residual pool or cache."""
    recoveries: tuple[Recovery, ...] = ()
    """Recoveries of the job, oldest first."""
    warnings: tuple[str, ...] = ()
    """What went wrong without ending the job; of each kind its number and the last one."""
    tables: tuple[TableSummary, ...] = ()
    """The embedding tables."""
    processes: tuple[ProcessSummary, ...] = ()
    """The processes of this start."""
    state_digest: str | None = None
    """SHA-256 of all rows, optimizer slots and dense parameters. Equal digests mean equal bits."""
    tower: dict[str, Any] | None = None
    """The dense model: what `auto` settings chose, cost of compilation, speed of matrix products, unsent residual; see
    above."""
    starts: tuple[Start, ...] = ()
    """Every start of the job, oldest first."""
    job: JobTotals = JobTotals()
    """The whole job over its starts."""
    versions: dict[str, str] = {}
    """Versions of Python and the main packages."""
    machine: dict[str, Any] = {}
    """System, processor, cores, memory."""
    commit: str | None = None
    """Commit of shardkeep's checkout; `-dirty` with changes; null outside of git."""

    def to_dict(self) -> dict[str, Any]:
        """Returns the summary as JSON types, without absent keys."""
        return self.model_dump(mode="json", exclude_unset=True)
