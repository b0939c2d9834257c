"""The server processes of a run, called together. Each holds the only copy of its state."""

from collections.abc import Sequence
from typing import Any

from jaxspeed.errors import RunError, StateLostError
from jaxspeed.objective.train_state import Arrays
from jaxspeed.parameter_server.ray.build_worker_program import Build
from jaxspeed.parameter_server.ray.cluster import SECONDS_TO_START, Cluster
from jaxspeed.parameter_server.ray.failures import PushLostError, died, lost, raised
from jaxspeed.parameter_server.ray.server_actor import ServerActor
from jaxspeed.parameter_server.ray.server_functions import LossScalars


class ServerPool:
    """Servers by number; `published` has a reference to each one's current parameters."""

    def __init__(self, ray: Any, cluster: Cluster, build: Build, first: int) -> None:
        self._ray, self._cluster = ray, cluster
        self._first = first  # the place of server 0 in the cluster
        self._build = ray.put(build)
        self._handles: list[Any] = [None] * build.servers
        self._built: list[Any] = [None] * build.servers
        self.published: list[Any] = []
        self.frozen: list[Any] = []
        for server in range(build.servers):
            self._start(server)

    # -- the state ------------------------------------------------------------------------------

    def fresh(self, seed: int) -> None:
        """Create a fresh state on the servers."""
        self._restart_dead()
        self._set_published(
            [handle.fresh.options(num_returns=2).remote(seed) for handle in self._handles]
        )

    def set_state(self, saved: Sequence[Arrays]) -> None:
        """Send each server its arrays of the state."""
        self._restart_dead()
        self._set_published(
            [
                handle.set_state.options(num_returns=2).remote(own)
                for handle, own in zip(self._handles, saved, strict=True)
            ]
        )

    def get_state(self) -> list[Arrays]:
        """Each server's arrays of the state."""
        found: list[Arrays] = self._get([handle.get_state.remote() for handle in self._handles])
        return found

    def _set_published(self, references: Sequence[Any]) -> None:
        self.published = [published for published, _ in references]
        self.frozen = [frozen for _, frozen in references]
        self._get([handle.alive.remote() for handle in self._handles])

    # -- updates --------------------------------------------------------------------------------

    def update(
        self, pushes: Sequence[Sequence[Any]], shares: Any, scalars: LossScalars
    ) -> dict[str, Any]:
        """One version, from pushes [worker][server]; its metrics.

        No server applies anything unless all of them have reduced their gradients: `apply` needs
        the sums of squares of all. So where a push is lost (PushLostError), the state is unchanged.
        """
        squares = [
            handle.reduce.remote(shares, *(push[server] for push in pushes))
            for server, handle in enumerate(self._handles)
        ]
        applied = [
            handle.apply.options(num_returns=2).remote(scalars, *squares)
            for handle in self._handles
        ]
        metrics: list[dict[str, Any]] = self._get([found for _, found in applied])
        self.published = [published for published, _ in applied]
        return metrics[0]

    # -- processes ------------------------------------------------------------------------------

    def pids(self) -> list[int]:
        """The process ids of the servers, once they have started."""
        found: list[int] = self._get(self._built, timeout=SECONDS_TO_START)
        return found

    def _start(self, server: int) -> None:
        self._handles[server] = self._cluster.start(ServerActor, self._first + server)
        self._built[server] = self._handles[server].build.remote(self._build, server)

    def _restart_dead(self) -> None:
        """Start another process in the place of each that died."""
        for server, handle in enumerate(self._handles):
            try:
                self._ray.get(handle.alive.remote(), timeout=SECONDS_TO_START)
            except self._ray.exceptions.RayActorError:
                self._start(server)
        self.pids()

    def _get(self, references: Sequence[Any], timeout: float | None = None) -> Any:
        """The results of these references, one per server.

        Raises:
          StateLostError: a server died.
          PushLostError: its input was lost.
          JaxspeedError: its exception.
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
