"""Asynchronous workers with bounded staleness: each accepted push makes a version."""

from collections import Counter
from typing import Any

from jaxspeed.objective.accumulate import Sums
from jaxspeed.parameter_server.server import ParameterServer
from jaxspeed.parameter_server.worker_schedule import WorkerSchedule
from jaxspeed.train.program import Metrics


class AsynchronousSchedule:
    """Bounded staleness by the program's rule: free workers get the next parts."""

    def __init__(self, server: ParameterServer) -> None:
        self.server = server
        program = server.program
        self.schedule = WorkerSchedule(
            program.rule, program.paces, program.config.run.seed, server.version
        )
        # Since the last report:
        self._losses: Sums | None = None
        self._update: Metrics | None = None
        self._stalenesses: list[int] = []
        self._last_counts = (0, 0, 0)

    @property
    def staleness(self) -> Counter[int]:
        return self.schedule.ledger.staleness

    def train(self, parts: list[Any]) -> Metrics:
        """Assign all parts; return once a push was accepted, with others possibly in flight.

        One is always accepted: as long as no version is made, pushes of workers that pulled here
        have staleness 0.
        """
        for part in parts:
            while (start := self.schedule.begin()) is None:
                self._arrive()
            self.server.pull(start.worker)
            self.server.compute(start.worker, part)
        while self._update is None:
            self._arrive()
        return self._report()

    def drain(self) -> None:
        """Process pushes until none is in flight."""
        while self._arrive():
            pass

    def _arrive(self) -> bool:
        """Process the next push; return whether there was one."""
        arrival = self.schedule.arrive()
        if arrival is None:
            return False
        server, push = self.server, arrival.push
        self._stalenesses.append(push.staleness)
        if push.accepted:
            sums = server.workers.push(arrival.worker)
            # It was computed under the loss scale of the version that was pulled.
            since = server.scale_since(arrival.worker)
            self._update = server.apply(sums, push.factor * since)
            sums = sums._replace(grads={})
        else:
            sums = server.workers.push_scalars(arrival.worker)
            server.workers.pushed(arrival.worker)  # its gradients were not sent
        assert server.version == self.schedule.ledger.version
        losses = self._losses
        self._losses = sums if losses is None else server.program.fold(losses, sums)
        return True

    def _report(self) -> Metrics:
        """The metrics since the last report, of pushes that may be of parts of an earlier call."""
        ledger, server = self.schedule.ledger, self.server
        assert self._update is not None and self._losses is not None
        counts = (ledger.accepted, ledger.dropped, ledger.waited)
        since = (now - before for now, before in zip(counts, self._last_counts, strict=True))
        extra: dict[str, float] = dict(zip(("accepted", "dropped", "waited"), since, strict=True))
        extra |= {
            "staleness_mean": sum(self._stalenesses) / len(self._stalenesses),
            "staleness_max": max(self._stalenesses),
            "version": server.version,
            "virtual_seconds": self.schedule.clock.now,
        }
        metrics = {**self._update, **server.program.mean_loss(self._losses)}
        self._losses, self._update, self._stalenesses, self._last_counts = None, None, [], counts
        return {**metrics, **{name: server.number(value) for name, value in extra.items()}}
