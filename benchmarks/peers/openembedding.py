"""OpenEmbedding 0.1.2 (4Paradigm): its C++ server and client through their C API, the tower in torch under DDP.

Its Python package wants an old TensorFlow; the library inside (`libcexb_pack.so`) needs none. Adagrad an element, as it
has no row-wise one. Pulls go out a step ahead and get the rows of that moment, pushes are waited for a step later: rows
are two steps old at most. Its own TensorFlow layer asks in order: openembedding_in_order.py.
"""

# B = batch, F = features, N = B * F, D = embedding dim

from __future__ import annotations

import ctypes
import os
import sys
from ctypes import c_bool, c_char, c_char_p, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from pathlib import Path

import torch
import torch.distributed as dist
from data import NUM_FEATURES, NUM_ROWS, ROW_EPS, ROW_LR, ROW_SCALE, pool, row_gradients
from groups import form_workers, leave
from measurement import Options, changed, options
from processes import Link, together
from torch.nn.parallel import DistributedDataParallel
from tower import Tower, loss, optimizer

LIBRARY = Path(sys.prefix) / "lib" / "openembedding" / "libcexb_pack.so"
CONFIG = b"{rpc: {io_thread_num: 1}, server: {server_concurrency: 1}}"
HOST = b"127.0.0.1"

SIGNATURES = {
    "exb_master_start": (c_void_p, [c_char_p]),
    "exb_master_endpoint": (None, [c_void_p, c_void_p]),
    "exb_connect": (c_void_p, [c_char_p, c_char_p, c_char_p]),
    "exb_disconnect": (None, [c_void_p]),
    "exb_server_start": (c_void_p, [c_void_p]),
    "exb_server_join": (None, [c_void_p]),
    "exb_context_initialize": (c_void_p, [c_void_p, c_int32, c_int32]),
    "exb_context_finalize": (None, [c_void_p]),
    "exb_create_storage": (c_void_p, [c_void_p, c_int32]),
    "exb_create_variable": (c_void_p, [c_void_p, c_uint64, c_size_t, c_char_p]),
    "exb_create_initializer": (c_void_p, [c_char_p]),
    "exb_set_initializer_property": (None, [c_void_p, c_char_p, c_char_p]),
    "exb_set_initializer": (None, [c_void_p, c_void_p]),
    "exb_create_optimizer": (c_void_p, [c_char_p]),
    "exb_set_optimizer_property": (None, [c_void_p, c_char_p, c_char_p]),
    "exb_set_optimizer": (None, [c_void_p, c_void_p]),
    "exb_pull_weights": (c_void_p, [c_void_p, c_void_p, c_size_t, c_int64]),
    "exb_pull_wait": (c_bool, [c_void_p, c_void_p, c_size_t, c_void_p]),
    "exb_push_gradients": (c_void_p, [c_void_p, c_void_p, c_size_t, c_void_p]),
    "exb_update_weights": (c_void_p, [c_void_p]),
    "exb_wait": (c_bool, [c_void_p]),
    "exb_last_error": (c_char_p, []),
}


def library() -> ctypes.CDLL:
    if not LIBRARY.exists():
        raise FileNotFoundError(f"{LIBRARY} is missing; benchmarks/peers/install fetches it, on Linux x86_64")
    found = ctypes.CDLL(str(LIBRARY))
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(found, name)
        function.restype, function.argtypes = result, arguments
    return found


def store(options: Options, link: Link) -> dist.Store:
    return dist.FileStore(f"{link.folder}/openembedding", 1 + options.workers)


def server(options: Options, link: Link) -> None:
    lib = library()
    master = lib.exb_master_start(HOST)
    endpoint = (c_char * 128)()
    lib.exb_master_endpoint(master, endpoint)
    running = lib.exb_server_start(lib.exb_connect(CONFIG, endpoint.value, HOST))
    store(options, link).set("endpoint", endpoint.value)
    lib.exb_server_join(running)
    store(options, link).wait([f"worker{rank} left" for rank in range(options.workers)])
    os._exit(0)  # the library's own end waits for a connection that is this process's


class Rows:
    """This worker's view of the one table: all 26 merged."""

    def __init__(self, options: Options, link: Link, rank: int) -> None:
        self.lib, self.dim, self.options = library(), options.dim, options
        endpoint = store(options, link).get("endpoint")
        self.connection = self.lib.exb_connect(CONFIG, endpoint, HOST)
        self.context = self.lib.exb_context_initialize(self.connection, options.workers, 1)
        self.storage = self.lib.exb_create_storage(self.context, -1)
        self.variable = self.lib.exb_create_variable(self.storage, NUM_ROWS, options.dim, b"float32")
        self.version = 0
        if rank == 0:
            self._configure("initializer", b"uniform", {"minval": -ROW_SCALE, "maxval": ROW_SCALE})
            settings = {"learning_rate": ROW_LR, "initial_accumulator_value": 0.0, "epsilon": ROW_EPS}
            self._configure("optimizer", b"adagrad", settings)
        if options.workers > 1:
            dist.barrier()

    def _configure(self, kind: str, name: bytes, settings: dict[str, float]) -> None:
        made = getattr(self.lib, f"exb_create_{kind}")(name)
        for key, value in settings.items():
            getattr(self.lib, f"exb_set_{kind}_property")(made, key.encode(), f"{value:.10f}".encode())
        getattr(self.lib, f"exb_set_{kind}")(self.variable, made)

    def ask(self, ids_N: torch.Tensor, *, after: int = 0) -> tuple[int, torch.Tensor]:
        """The rows as they are, or once as many more updates as `after` are in them. The client drops duplicates."""
        waiter = self.lib.exb_pull_weights(self.variable, ids_N.data_ptr(), len(ids_N), self.version + after)
        return waiter, ids_N

    def take(self, asked: tuple[int, torch.Tensor]) -> torch.Tensor:
        waiter, ids_N = asked
        rows_ND = torch.empty(len(ids_N), self.dim)
        self._check(self.lib.exb_pull_wait(waiter, ids_N.data_ptr(), len(ids_N), rows_ND.data_ptr()))
        return rows_ND

    def push(self, ids_N: torch.Tensor, grad_ND: torch.Tensor) -> int:
        return self.lib.exb_push_gradients(self.variable, ids_N.data_ptr(), len(ids_N), grad_ND.data_ptr())

    def apply(self, pushed: int) -> None:
        """Ends a push and has all workers' pushes applied as one update."""
        self._check(self.lib.exb_wait(pushed))
        if self.options.workers > 1:
            dist.barrier()
        self._check(self.lib.exb_wait(self.lib.exb_update_weights(self.storage)))
        self.version += 1

    def close(self) -> None:
        self.lib.exb_context_finalize(self.context)
        self.lib.exb_disconnect(self.connection)

    def _check(self, fine: bool) -> None:
        if not fine:
            raise RuntimeError(f"OpenEmbedding: {self.lib.exb_last_error().decode()}")


class Worker:
    def __init__(self, options: Options, link: Link, rank: int) -> None:
        self.options = options
        self.rows = Rows(options, link, rank)
        self.batches = pool(options.batch, seed=options.seed + rank)
        self.grad_ND = row_gradients(options.batch, options.dim)
        torch.manual_seed(options.seed)
        tower = Tower(options.dim).to(options.device)
        alone = options.workers == 1
        self.tower = tower if alone else DistributedDataParallel(tower, gradient_as_bucket_view=True)
        self.sgd = optimizer(tower)
        self.ahead = self.rows.ask(self.batches[0].merged_N)
        self.pushed: int | None = None
        self.held: torch.Tensor | None = None

    def _next(self, i: int) -> torch.Tensor:
        asked, self.ahead = self.ahead, self.rows.ask(self.batches[(i + 1) % len(self.batches)].merged_N)
        return self.rows.take(asked)

    def _push(self, i: int, grad_ND: torch.Tensor) -> None:
        if self.pushed is not None:
            self.rows.apply(self.pushed)
        self.held = grad_ND  # until the push has ended
        self.pushed = self.rows.push(self.batches[i % len(self.batches)].merged_N, grad_ND)

    def pull_push(self, i: int) -> None:
        self._next(i)
        self._push(i, self.grad_ND)

    def train(self, i: int) -> torch.Tensor:
        batch, device = self.batches[i % len(self.batches)], self.options.device
        emb_ND = self._next(i).to(device).requires_grad_()
        self.sgd.zero_grad()
        logits = self.tower(batch.dense_BI.to(device), emb_ND.view(-1, NUM_FEATURES, self.options.dim))
        value = loss(logits, batch.label_B1.to(device))
        value.backward()
        self.sgd.step()
        self._push(i, emb_ND.grad.cpu())
        return value

    def finish(self) -> None:
        self.rows.take(self.ahead)
        if self.pushed is not None:
            self.rows.apply(self.pushed)


def worker(options: Options, link: Link, rank: int, kind: type[Worker] = Worker) -> None:
    form_workers(link, rank, options.workers)
    each = kind(options, link, rank)
    sample = torch.unique(each.batches[0].merged_N)
    before = each.rows.take(each.rows.ask(sample))
    figures = link.window(options, rank).run(each.train if options.workload == "w1" else each.pull_push)
    each.finish()
    if rank == 0:
        link.done(figures, changed(before, each.rows.take(each.rows.ask(sample))))
    each.rows.close()
    store(options, link).set(f"worker{rank} left", "yes")
    leave()


def main(options: Options, kind: type[Worker] = Worker) -> None:
    cores = options.cores
    roles = {"server": (server, (), cores[1:2] if options.workers == 1 and len(cores) > 1 else cores)}
    for rank in range(options.workers):
        roles[f"worker{rank}"] = (worker, (rank, kind), [cores[rank % len(cores)]])
    together(options, roles)


if __name__ == "__main__":
    main(options(__doc__, max_workers=8))
