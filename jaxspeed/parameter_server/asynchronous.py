"""Each worker at its own pace: a part for whoever is free, and a version for each accepted push."""

from collections import Counter
from typing import Any

from jaxspeed.objective.accumulate import Sums
from jaxspeed.parameter_server.service import Service
from jaxspeed.parameter_server.turns import Turns
from jaxspeed.train.program import Metrics


class OwnPace:
    """Bounded staleness, as the rule of the program says."""

    def __init__(self, service: Service) -> None:
        self.service = service
        program = service.program
        self.turns = Turns(program.rule, program.paces, program.config.run.seed, service.version)
        # Since the last report:
        self._losses: Sums | None = None
        self._update: Metrics | None = None
        self._ages: list[int] = []
        self._counted = (0, 0, 0)

    @property
    def staleness(self) -> Counter[int]:
        return self.turns.ledger.staleness

    def train(self, parts: list[Any]) -> Metrics:
        """All parts handed out; at least one push accepted, others still under way.

        There is one: as long as no version is made, the pushes of those who pulled here have
        staleness 0.
        """
        for part in parts:
            while (start := self.turns.begin()) is None:
                self._arrive()
            self.service.pull(start.worker)
            self.service.compute(start.worker, part)
        while self._update is None:
            self._arrive()
        return self._report()

    def drain(self) -> None:
        """Until nothing is under way."""
        while self._arrive():
            pass

    def _arrive(self) -> bool:
        """The next push; whether there was one."""
        arrival = self.turns.arrive()
        if arrival is None:
            return False
        service, push = self.service, arrival.push
        self._ages.append(push.staleness)
        if push.accepted:
            sums = service.fleet.push(arrival.worker)
            # It was computed under the loss scale of the version that was pulled.
            since = service.scale_since(arrival.worker)
            self._update = service.apply(sums, push.factor * since)
            sums = sums._replace(grads={})
        else:
            sums = service.fleet.push_scalars(arrival.worker)
            service.fleet.pushed(arrival.worker)  # its gradients were not sent
        assert service.version == self.turns.ledger.version
        losses = self._losses
        self._losses = sums if losses is None else service.program.fold(losses, sums)
        return True

    def _report(self) -> Metrics:
        """What happened since the last one; that may be pushes of parts of an earlier call."""
        ledger, service = self.turns.ledger, self.service
        assert self._update is not None and self._losses is not None
        counts = (ledger.accepted, ledger.dropped, ledger.waited)
        since = (now - before for now, before in zip(counts, self._counted, strict=True))
        told: dict[str, float] = dict(zip(("accepted", "dropped", "waited"), since, strict=True))
        told |= {
            "staleness_mean": sum(self._ages) / len(self._ages),
            "staleness_max": max(self._ages),
            "version": service.version,
            "virtual_seconds": self.turns.clock.now,
        }
        metrics = {**self._update, **service.program.mean_loss(self._losses)}
        self._losses, self._update, self._ages, self._counted = None, None, [], counts
        return {**metrics, **{name: service.number(value) for name, value in told.items()}}
