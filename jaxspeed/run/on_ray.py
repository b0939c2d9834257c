"""A run whose workers and servers are processes on Ray."""

from dataclasses import dataclass

from jaxspeed.config import Config
from jaxspeed.engine.run_devices import start_devices
from jaxspeed.parameter_server.ray import RayEngine, initialize, staff_of
from jaxspeed.run.start import Source


@dataclass(frozen=True)
class RaySource(Source):
    """As `Source`; this process itself has no device but its CPU."""

    @staticmethod
    def start_devices(config: Config) -> None:
        staff_of(config)  # what Ray cannot do is told before anything begins
        start_devices("cpu")

    def engine(self) -> RayEngine:
        return initialize(self.model, self.loss_fn, self.config, self.optimizer)

    def batch_size(self) -> int:
        return staff_of(self.config).batch.train
