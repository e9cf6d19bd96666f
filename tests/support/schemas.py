"""Checks files of deploy/ by their engines' own schemas, in the environment of engines: `schemas.py KIND FILE`.

Prints one line a fault. What a schema does not know is a fault.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

OLDEST = "1.31"


def kubernetes(document: Any) -> Iterator[str]:
    import kubernetes_validate as checker

    for version in (OLDEST, checker.latest_version()):
        try:
            checker.validate(document, version, strict=True)
        except checker.ValidationError as error:
            yield f"{version}: {document['kind']}: {'/'.join(map(str, error.path))}: {error.message}"


def trainer(document: Any) -> Iterator[str]:
    import kubeflow_trainer_api.models as models

    model = getattr(models, f"TrainerV1alpha1{document['kind']}")
    yield from lost(document, model.from_dict(document).to_dict())


def dstack(document: Any) -> Iterator[str]:
    from dstack._internal.core.models.configurations import TaskConfiguration

    try:
        TaskConfiguration.model_validate(document)
    except ValueError as error:
        yield " ".join(str(error).split())


def lost(document: Any, read: Any, path: str = "") -> Iterator[str]:
    """The keys of a document that a model did not read."""
    if isinstance(document, dict):
        for key, value in document.items():
            if isinstance(read, dict) and key in read:
                yield from lost(value, read[key], f"{path}/{key}")
            else:
                yield f"{path}/{key}: unknown"
    elif isinstance(document, list):
        for index, (value, its) in enumerate(zip(document, read, strict=True)):
            yield from lost(value, its, f"{path}/{index}")


CHECKS: dict[str, Callable[[Any], Iterator[str]]] = {"kubernetes": kubernetes, "trainer": trainer, "dstack": dstack}

if __name__ == "__main__":
    kind, file = sys.argv[1:]
    for document in yaml.safe_load_all(Path(file).read_text(encoding="utf-8")):
        for fault in CHECKS[kind](document):
            print(fault)
