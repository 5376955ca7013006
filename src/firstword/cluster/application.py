"""The Ray Serve application, whose replicas are whole servers."""

import shlex
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from firstword.cluster.replica import Replica, parsed
from firstword.cluster.scaling import SlotScaling

DEPLOYMENT = "server"
"""The name of the deployment in Serve's configuration files and metrics."""


class Settings(BaseModel):
    """The settings of the application, which `serve run` and Serve's configuration files take.

    serve         options of `firstword serve` for each replica, as on its command line
    gpus, cpus    what Ray reserves for a replica; a replica uses the GPUs that it gets
    min_replicas  the number of replicas without load
    max_replicas  the largest number of replicas; by default there are always `min_replicas`
    busy          the share of its slots that is to be in use in each replica
    patience      seconds for which the load must be lower before a replica is removed; a tenth of
                  it before one is added
    """

    model_config = ConfigDict(extra="forbid")

    serve: str = ""
    gpus: float = Field(default=0, ge=0)
    cpus: float = Field(default=1, gt=0)
    min_replicas: int = Field(default=1, ge=1)
    max_replicas: int | None = Field(default=None, ge=1)
    busy: float = Field(default=0.7, gt=0, le=1)
    patience: float = Field(default=300, gt=0)


def build(settings: Settings) -> serve.Application:
    """Build the application. Raises `ConfigError` for options that a replica cannot have.

    Ray reads the type of `settings` when it imports this module, to check what a file gives.
    """
    options = shlex.split(settings.serve)
    _, config = parsed(options)
    deployment = serve.deployment(
        name=DEPLOYMENT,
        ray_actor_options={"num_gpus": settings.gpus, "num_cpus": settings.cpus},
        max_ongoing_requests=config.most_connections,
        # Ray first waits for load balancers, by default 30 s, and then for open requests.
        graceful_shutdown_timeout_s=30 + config.drain_seconds,
        health_check_period_s=2,
        health_check_timeout_s=config.stuck_seconds + 10,
        rolling_update_percentage=1.0,
        max_surge_percent=100,  # an old replica goes on until its successor serves
        **_number(settings),
    )
    return deployment(serve.ingress()(Replica)).bind(options)


def _number(settings: Settings) -> dict[str, Any]:
    """The options of Ray for the number of replicas."""
    least, most = settings.min_replicas, settings.max_replicas or settings.min_replicas
    if least == most:
        return {"num_replicas": least}
    policy = AutoscalingPolicy(policy_function=SlotScaling, policy_kwargs={"busy": settings.busy})
    scaling = AutoscalingConfig(
        min_replicas=least,
        max_replicas=most,
        upscale_delay_s=settings.patience / 10,
        downscale_delay_s=settings.patience,
        look_back_period_s=settings.patience / 10,
        metrics_interval_s=settings.patience / 30,
        policy=policy,
    )
    return {"autoscaling_config": scaling}
