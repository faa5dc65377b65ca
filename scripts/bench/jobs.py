"""Runs of a bench in processes of their own, with what is done and a guess of what is left."""

import multiprocessing
import os
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from typing import Any, TypeVar

import click

from sapo_node.workers import die_with_parent

K = TypeVar("K")
R = TypeVar("R")


def in_processes(jobs: dict[K, tuple[Any, ...]], workers: int, ended: Callable[[K, R], str]) -> None:
    """Call each job's function in a process of its own; `ended` takes its key and result, and says what to tell.

    A job that fails is told and costs the others nothing. Raises ClickException at the end if there was one.
    """
    began, taken, failed = time.monotonic(), 0, 0
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, spawn, initializer=die_with_parent, initargs=(os.getpid(),))
    try:
        waiting: dict[Future[R], K] = {pool.submit(*job): key for key, job in jobs.items()}
        while waiting:
            done, _ = wait(waiting, return_when=FIRST_COMPLETED)
            for future in done:
                key = waiting.pop(future)
                taken += 1
                if (error := future.exception()) is not None:
                    failed += 1
                    click.echo(f"{taken} of {len(jobs)}: {key} failed: {type(error).__name__}: {error}", err=True)
                    continue
                told = ended(key, future.result())
                minutes = (time.monotonic() - began) / 60
                left = minutes / taken * len(waiting)
                click.echo(f"{taken} of {len(jobs)}: {told}; {minutes:.0f} min, about {left:.0f} more")
    finally:
        pool.shutdown(cancel_futures=True)
    if failed:
        raise click.ClickException(f"{failed} of {len(jobs)} runs failed; the same command takes them again")
