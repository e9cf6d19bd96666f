"""A job's figures in MLflow, in a file of this folder. Run it where mlflow is installed:

python examples/mlflow_callback.py
mlflow ui --backend-store-uri sqlite:///mlflow.db
"""

import mlflow

import shardkeep


class MlflowCallback(shardkeep.Callback):
    def on_start(self, event: shardkeep.callbacks.StartEvent) -> None:
        mlflow.start_run(run_name=event.run_dir.name)
        mlflow.log_params({"batch_size": event.config.train.batch_size, "model": event.config.model.name})
        mlflow.log_text(event.config.to_yaml(), "config.yaml")

    def on_progress(self, event: shardkeep.callbacks.ProgressEvent) -> None:
        mlflow.log_metrics({"loss": event.loss, "samples_per_s": event.samples_per_s}, step=event.step)

    def on_evaluation(self, event: shardkeep.callbacks.EvaluationEvent) -> None:
        mlflow.log_metrics({"bytes_per_sample": event.bytes_per_sample, **event.metrics}, step=event.step)

    def on_end(self, summary: shardkeep.callbacks.Summary) -> None:
        mlflow.log_dict(summary.to_dict(), "summary.json")
        mlflow.end_run("FINISHED" if summary.status == "completed" else "FAILED")


mlflow.set_tracking_uri("sqlite:///mlflow.db")
job = {"data": {"synthetic": {"train_samples": 400_000, "table_sizes": [500, 200]}}, "eval": {"every_steps": 40}}
summary = shardkeep.train(shardkeep.JobConfig.model_validate(job), callbacks=[MlflowCallback()])
print(f"loss {summary.eval.logloss:.3f}")
