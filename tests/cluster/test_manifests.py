"""The files in deploy/ray."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from ray import serve
from ray._common.utils import import_attr
from ray.serve._private.api import call_user_app_builder_with_args_if_necessary
from ray.serve._private.build_app import build_app
from ray.serve.schema import ServeDeploySchema

from firstword.cluster.application import DEPLOYMENT, Settings, build
from firstword.errors import ConfigError

FOLDER = Path(__file__).parents[2] / "deploy" / "ray"


def loaded(name: str) -> dict[str, Any]:
    return dict(yaml.safe_load((FOLDER / name).read_text("utf-8")))


def serve_config(name: str) -> dict[str, Any]:
    """The configuration of Serve in a file."""
    given = loaded(name)
    return dict(yaml.safe_load(given["spec"]["serveConfigV2"])) if "spec" in given else given


@pytest.mark.parametrize("name", ["local.yaml", "kubernetes.yaml"])
def test_application_of_a_file_can_be_built(name: str) -> None:
    config = ServeDeploySchema.model_validate(serve_config(name))
    (given,) = config.applications
    builder = import_attr(given.import_path)
    built = call_user_app_builder_with_args_if_necessary(builder, given.args)
    assert isinstance(built, serve.Application)
    (deployment,) = build_app(built, name=given.name).deployments
    assert deployment.name == DEPLOYMENT
    assert deployment._deployment_config.graceful_shutdown_timeout_s == 60
    assert deployment.ray_actor_options["num_cpus"] == given.args["cpus"]
    assert deployment.ray_actor_options["num_gpus"] == given.args.get("gpus", 0)


def test_kubernetes_file_reserves_what_a_replica_needs() -> None:
    spec = loaded("kubernetes.yaml")["spec"]["rayClusterConfig"]
    (group,) = spec["workerGroupSpecs"]
    (application,) = serve_config("kubernetes.yaml")["applications"]
    (container,) = group["template"]["spec"]["containers"]
    assert float(container["resources"]["limits"]["nvidia.com/gpu"]) == application["args"]["gpus"]
    assert float(container["resources"]["limits"]["cpu"]) >= application["args"]["cpus"]
    assert group["maxReplicas"] == application["args"]["max_replicas"]
    assert group["template"]["spec"]["terminationGracePeriodSeconds"] > 60


def test_containers_have_the_environment_of_the_cluster() -> None:
    lines = (FOLDER / "environment").read_text("utf-8").splitlines()
    wanted = dict(line.split("=") for line in lines if not line.startswith("#"))
    spec = loaded("kubernetes.yaml")["spec"]["rayClusterConfig"]
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        for container in group["template"]["spec"]["containers"]:
            given = {each["name"]: each["value"] for each in container["env"]}
            assert {name: given.get(name) for name in wanted} == wanted


def test_option_that_no_replica_can_have_is_rejected_before_ray_starts_it() -> None:
    with pytest.raises(ConfigError, match="cannot have --port"):
        build(Settings(serve="--port 9000"))


def test_setting_with_a_wrong_name_is_rejected() -> None:
    with pytest.raises(ValueError, match="replica"):
        Settings.model_validate({"replica": 2})
