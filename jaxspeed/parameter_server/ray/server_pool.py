"""The servers of a run, called together. What one of them holds is nowhere else."""

from collections.abc import Sequence
from typing import Any

from jaxspeed.errors import RunError, StateLostError
from jaxspeed.objective.train_state import Arrays
from jaxspeed.parameter_server.ray.build_worker_program import Build
from jaxspeed.parameter_server.ray.cluster import SECONDS_TO_START, Cluster
from jaxspeed.parameter_server.ray.failures import PushLostError, died, lost, raised
from jaxspeed.parameter_server.ray.server_actor import Server
from jaxspeed.parameter_server.ray.server_functions import Told


class Servers:
    """Servers by number. What is published last is at `published`: a reference for each of them."""

    def __init__(self, ray: Any, cluster: Cluster, build: Build, first: int) -> None:
        self._ray, self._cluster = ray, cluster
        self._first = first  # the place of server 0 in the cluster
        self._build = ray.put(build)
        self._handles: list[Any] = [None] * build.servers
        self._built: list[Any] = [None] * build.servers
        self.published: list[Any] = []
        self.frozen: list[Any] = []
        for server in range(build.servers):
            self._call_in(server)

    # -- the state ------------------------------------------------------------------------------

    def fresh(self, seed: int) -> None:
        """A fresh state, made where it is to live."""
        self._revive()
        self._began([handle.fresh.options(num_returns=2).remote(seed) for handle in self._handles])

    def take(self, kept: Sequence[Arrays]) -> None:
        """The state of these arrays, of each server its own."""
        self._revive()
        self._began(
            [
                handle.take.options(num_returns=2).remote(own)
                for handle, own in zip(self._handles, kept, strict=True)
            ]
        )

    def give(self) -> list[Arrays]:
        """The arrays of the state, of each server its own."""
        found: list[Arrays] = self._got([handle.give.remote() for handle in self._handles])
        return found

    def _began(self, references: Sequence[Any]) -> None:
        self.published = [published for published, _ in references]
        self.frozen = [frozen for _, frozen in references]
        self._got([handle.alive.remote() for handle in self._handles])

    # -- updates --------------------------------------------------------------------------------

    def update(self, pushes: Sequence[Sequence[Any]], shares: Any, told: Told) -> dict[str, Any]:
        """One version, of pushes [worker][server]; its metrics.

        No server applies anything unless all of them have added up their gradients: what each
        needs of the others, the sums of squares, is there only then. So where a push is lost on
        the way (PushLostError), the state is as it was.
        """
        squares = [
            handle.reduce.remote(shares, *(push[server] for push in pushes))
            for server, handle in enumerate(self._handles)
        ]
        applied = [
            handle.apply.options(num_returns=2).remote(told, *squares) for handle in self._handles
        ]
        metrics: list[dict[str, Any]] = self._got([found for _, found in applied])
        self.published = [published for published, _ in applied]
        return metrics[0]

    # -- processes ------------------------------------------------------------------------------

    def pids(self) -> list[int]:
        """The processes of the servers, once they are there."""
        found: list[int] = self._got(self._built, timeout=SECONDS_TO_START)
        return found

    def _call_in(self, server: int) -> None:
        self._handles[server] = self._cluster.start(Server, self._first + server)
        self._built[server] = self._handles[server].build.remote(self._build, server)

    def _revive(self) -> None:
        """Another process in the place of each that died."""
        for server, handle in enumerate(self._handles):
            try:
                self._ray.get(handle.alive.remote(), timeout=SECONDS_TO_START)
            except self._ray.exceptions.RayActorError:
                self._call_in(server)
        self.pids()

    def _got(self, references: Sequence[Any], timeout: float | None = None) -> Any:
        """What these are, of each server one.

        Raises:
          StateLostError: a server died.
          PushLostError: what it was to work on is gone.
          JaxspeedError: what it raised.
        """
        try:
            return self._ray.get(list(references), timeout=timeout)
        except self._ray.exceptions.GetTimeoutError:
            raise RunError(f"the servers did not answer within {timeout:g} s") from None
        except self._ray.exceptions.RayError as error:
            why = died(self._ray, error)
            if why is not None:
                raise StateLostError(f"a server died ({why})") from error
            if lost(self._ray, error):
                raise PushLostError(str(error)) from error
            raise raised(self._ray, error, "a server") from error
