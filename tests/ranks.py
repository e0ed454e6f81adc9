"""Processes that stay: ranks of a gloo group, forked once, that run one function after another."""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT_S = 60


class Ranks:
    """`world` ranks. `run(function, *args)` calls `function(rank, *args)` on every one and returns their results.

    Raises:
        RuntimeError: a rank raised (its traceback is in the message), died, or was not done within TIMEOUT_S.
    """

    def __init__(self, world: int):
        context = multiprocessing.get_context("fork")
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        self.world = world
        self._pipes, self._processes = [], []
        for rank in range(world):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, world, port, there), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def run(self, function: Callable, *args: Any) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((function, args))
        results, errors = [], []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(TIMEOUT_S):
                raise RuntimeError(
                    f"rank {rank} of {self.world} was not done with {function.__name__} within {TIMEOUT_S} s"
                )
            ok, value = pipe.recv()
            (results if ok else errors).append(value if ok else f"rank {rank} of {self.world}:\n{value}")
        if errors:
            raise RuntimeError("\n".join(errors))
        return results

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()


def _serve(rank: int, world: int, port: int, pipe) -> None:
    torch.set_num_threads(1)  # a forked child must not enter the parent's pool of threads
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo"}
    dist.init_process_group("gloo", rank=rank, world_size=world, timeout=timedelta(seconds=30))
    while True:
        task = pipe.recv()
        if task is None:
            os._exit(0)
        function, args = task
        try:
            answer = (True, function(rank, *args))
        except BaseException:
            answer = (False, traceback.format_exc())
        pipe.send(answer)
