"""A job's figures in Weights & Biases. Run it where wandb is installed; offline, nothing leaves this machine:

WANDB_MODE=offline python examples/wandb_callback.py
"""

import wandb

import shardkeep


class WandbCallback(shardkeep.Callback):
    def on_start(self, event: shardkeep.callbacks.StartEvent) -> None:
        self.run = wandb.init(project="shardkeep", name=event.run_dir.name, config=event.config.model_dump(mode="json"))
        self.run.define_metric("*", step_metric="step")

    def on_progress(self, event: shardkeep.callbacks.ProgressEvent) -> None:
        self.run.log({"step": event.step, "loss": event.loss, "samples_per_s": event.samples_per_s})

    def on_evaluation(self, event: shardkeep.callbacks.EvaluationEvent) -> None:
        metrics = {f"eval/{name}": value for name, value in event.metrics.items()}
        self.run.log({"step": event.step, "bytes_per_sample": event.bytes_per_sample, **metrics})

    def on_end(self, summary: shardkeep.callbacks.Summary) -> None:
        self.run.summary["status"] = summary.status
        self.run.finish(exit_code=0 if summary.status == "completed" else 1)


job = {"data": {"synthetic": {"train_samples": 400_000, "table_sizes": [500, 200]}}, "eval": {"every_steps": 40}}
summary = shardkeep.train(shardkeep.JobConfig.model_validate(job), callbacks=[WandbCallback()])
print(f"loss {summary.eval.logloss:.3f}")
