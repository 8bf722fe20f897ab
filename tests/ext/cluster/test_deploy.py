"""What is in deploy/cluster: files for other programs are whole, agree, and fit their schemas."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from perdure.ext.cluster.ray.config import ClusterConfig

yaml: Any = pytest.importorskip("yaml", reason="PyYAML is not installed")

FOLDER = Path(__file__).parents[3] / "deploy" / "cluster"
MANIFESTS = sorted(path.name for path in FOLDER.glob("*.yaml") if path.name != "compose.yaml")


def documents(name: str) -> list[dict[str, Any]]:
    return [each for each in yaml.safe_load_all((FOLDER / name).read_text()) if each]


def every() -> list[dict[str, Any]]:
    return [each for name in MANIFESTS for each in documents(name)]


def pods() -> list[tuple[str, dict[str, Any]]]:
    """Templates of pods, wherever they stand."""
    found = []
    for each in every():
        if each["kind"] == "Deployment":
            found.append((each["metadata"]["name"], each["spec"]["template"]))
        elif each["kind"] == "RayService":
            cluster = each["spec"]["rayClusterConfig"]
            groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
            found += [(group.get("groupName", "head"), group["template"]) for group in groups]
    return found


def test_every_pod_has_resources_and_no_rights_that_it_does_not_need() -> None:
    assert len(pods()) == 3
    for name, template in pods():
        spec = template["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True, name
        for container in spec["containers"]:
            assert {"cpu", "memory"} <= set(container["resources"]["requests"]), name
            assert "memory" in container["resources"]["limits"], name
            assert container["securityContext"]["allowPrivilegeEscalation"] is False, name
            mounted = {each["name"] for each in container["volumeMounts"]}
            assert mounted == {each["name"] for each in spec["volumes"]}, name


def test_a_replica_is_told_to_go_long_before_it_is_killed() -> None:
    [deployment] = [each for each in every() if each["kind"] == "Deployment"]
    spec = deployment["spec"]["template"]["spec"]
    [container] = spec["containers"]
    assert {"startupProbe", "readinessProbe", "livenessProbe"} <= set(container)
    assert container["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert container["livenessProbe"]["httpGet"]["path"] == "/health", "one that drains is alive"
    drain = next(int(word[8:]) for word in container["args"] if word.startswith("--drain="))
    assert drain >= 2 * container["readinessProbe"]["periodSeconds"]
    assert spec["terminationGracePeriodSeconds"] > drain + 20


def test_what_is_named_is_there() -> None:
    there = {(each["kind"], each["metadata"]["name"]) for each in every()}
    for name, template in pods():
        for container in template["spec"]["containers"]:
            for source in container["envFrom"]:
                for kind, of in (("secretRef", "Secret"), ("configMapRef", "ConfigMap")):
                    assert kind not in source or (of, source[kind]["name"]) in there, (name, source)
        for volume in template["spec"]["volumes"]:
            claim = volume.get("persistentVolumeClaim", {}).get("claimName")
            assert claim is None or ("PersistentVolumeClaim", claim) in there
    labels = [template["metadata"]["labels"]["app"] for _, template in pods()]
    for each in every():
        if each["kind"] == "NetworkPolicy":
            assert each["spec"]["podSelector"]["matchLabels"]["app"] in labels
            assert set(each["spec"]["policyTypes"]) == {"Ingress", "Egress"}


def test_no_secret_is_in_them() -> None:
    for path in FOLDER.iterdir():
        text = path.read_text()
        assert not re.search(r"postgresql://\w+:[^@\s]+@", text), path
        for value in re.findall(r"PASSWORD: *(.*)", text):
            assert value == "change-me" or value.startswith("${"), path


def test_the_config_of_ray_is_the_same_in_both_places_and_can_be_read() -> None:
    config = ClusterConfig.read(FOLDER / "cluster.toml")
    assert config.replicas.max == 8
    [inside] = [each for each in every() if each["metadata"]["name"] == "perdure-cluster"]
    assert tomllib.loads(inside["data"]["cluster.toml"]) == tomllib.loads(
        (FOLDER / "cluster.toml").read_text()
    )
    [service] = [each for each in every() if each["kind"] == "RayService"]
    serve = yaml.safe_load(service["spec"]["serveConfigV2"])
    [application] = serve["applications"]
    assert application["import_path"] == "perdure.ext.cluster.ray.application:application"
    workers = service["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert sum(each["maxReplicas"] for each in workers) >= config.replicas.max
    pyproject = (FOLDER.parents[1] / "pyproject.toml").read_text()
    pinned = tomllib.loads(pyproject)["project"]["optional-dependencies"]["ray"][0]
    assert service["spec"]["rayClusterConfig"]["rayVersion"].rpartition(".")[0] in pinned


def test_the_compose_file_names_what_it_has() -> None:
    compose = yaml.safe_load((FOLDER / "compose.yaml").read_text())
    services = compose["services"]
    assert set(services) == {"router", "replica", "keys", "postgres"}
    for name, service in services.items():
        assert set(service.get("depends_on", ())) <= set(services), name
        for volume in service.get("volumes", ()):
            source = volume.partition(":")[0]
            assert source in compose["volumes"] or (FOLDER / source).is_file(), (name, volume)
    assert "replica:8080" in (FOLDER / "haproxy.cfg").read_text()
    assert (FOLDER / services["replica"]["build"]["context"] / "deploy" / "Dockerfile").is_file()


@pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed")
def test_nginx_takes_its_file(tmp_path: Path) -> None:
    text = (FOLDER / "nginx.conf").read_text()
    for number in (1, 2):
        # Names are looked up when it starts.
        text = text.replace(f"replica{number}:8080", f"127.0.0.1:{8080 + number}")
    (tmp_path / "nginx.conf").write_text(text)
    command = ["nginx", "-t", "-p", str(tmp_path), "-c", str(tmp_path / "nginx.conf"), "-g", "pid nginx.pid;"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert not done.returncode, done.stderr


@pytest.mark.parametrize("name", MANIFESTS)
def test_the_kubernetes_objects_fit_their_schemas(name: str) -> None:
    """Those of Kubernetes itself, and the pods in those of others. `pip install kubernetes-validate` (22 MB)
    is in `make soak` alone."""
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    checked = 0
    for each in documents(name):
        group = each["apiVersion"].partition("/")[0]
        if group in ("v1", "apps", "policy", "autoscaling", "networking.k8s.io"):
            validate.validate(each, validate.latest_version(), strict=True)
            checked += 1
    if name == "kuberay.yaml":
        for group, template in pods():
            pod = {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": group, **template["metadata"]},
                "spec": template["spec"],
            }
            validate.validate(pod, validate.latest_version(), strict=True)
            checked += 1
    assert checked or name.startswith("gateway")


# The fields that our objects have of two CRDs that no package carries, as these say on 2026-11-18:
# InferencePool of inference.networking.k8s.io/v1, RayService of ray.io/v1.


class Strict(BaseModel):
    """An API server drops a field that it does not know without a word; here it is an error."""

    model_config = ConfigDict(extra="forbid", strict=True, alias_generator=to_camel)


class Port(Strict):
    number: int = Field(ge=1, le=65535)


class Labels(Strict):
    match_labels: dict[str, Annotated[str, Field(pattern=r"^(([A-Za-z0-9][-\w.]*)?[A-Za-z0-9])?$")]] = Field(
        min_length=1, max_length=64
    )


class EndpointPicker(Strict):
    name: str = Field(min_length=1, max_length=253)
    port: Port
    """Left out only where `kind` is no Service."""
    failure_mode: Literal["FailOpen", "FailClose"] = "FailClose"


class InferencePool(Strict):
    selector: Labels
    target_ports: list[Port] = Field(min_length=1, max_length=8)
    endpoint_picker_ref: EndpointPicker


class RayGroup(Strict):
    ray_start_params: dict[str, str]
    template: dict[str, Any]
    """A pod: `test_the_kubernetes_objects_fit_their_schemas` looks at it."""


class RayWorkers(RayGroup):
    group_name: str
    replicas: int = 0
    min_replicas: int
    max_replicas: int


class RayClusterSpec(Strict):
    ray_version: str = ""
    enable_in_tree_autoscaling: bool | None = None
    head_group_spec: RayGroup
    worker_group_specs: list[RayWorkers] = []


class RayService(Strict):
    serve_config_v2: str
    ray_cluster_config: RayClusterSpec


@pytest.mark.parametrize("kind", [InferencePool, RayService])
def test_objects_of_other_projects_have_the_fields_that_their_crds_know(kind: type[Strict]) -> None:
    [spec] = [each["spec"] for each in every() if each["kind"] == kind.__name__]
    kind.model_validate(spec)
    for wrong in ({**spec, "unknown": 1}, {**spec, next(iter(spec)): 5}):
        with pytest.raises(ValidationError):
            kind.model_validate(wrong)


GATEWAYS = ("gateway-api", "envoy-gateway")
"""Packages of npm with the schemas of the Gateway API and of Envoy Gateway, as code that checks an object."""
VALIDATE = """
import fs from 'fs';
const [folder, ...files] = process.argv.slice(2);
const wrong = [];
for (const object of JSON.parse(fs.readFileSync(0))) {
    const [group, version] = object.apiVersion.split('/');
    const name = group.includes('envoyproxy') ? 'envoy-gateway' : 'gateway-api';
    const schemas = `${folder}/node_modules/@kubernetes-models/${name}/_schemas`;
    const end = `${version[0].toUpperCase()}${version.slice(1)}${object.kind}.js`;
    const [file] = fs.readdirSync(schemas).filter(each => each.endsWith(end));
    const {validate} = await import(`${schemas}/${file}`);
    wrong.push(validate(object) ? null : JSON.stringify(validate.errors));
}
console.log(JSON.stringify(wrong));
"""


@pytest.mark.soak
def test_the_gateways_objects_fit_their_schemas(tmp_path: Path) -> None:
    """All but the inference extension's pool, whose schema no package has: its fields are checked above."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    packages = [f"@kubernetes-models/{name}@^2.0.0" for name in (*GATEWAYS, "apimachinery")]
    command = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(tmp_path), *packages]
    if subprocess.run(command, capture_output=True, cwd=tmp_path).returncode:
        pytest.skip("the schemas could not be fetched")
    (tmp_path / "validate.mjs").write_text(VALIDATE)
    objects = [each for each in every() if "gateway" in each["apiVersion"]]
    assert len(objects) == 5

    def wrong(given: list[dict[str, Any]]) -> list[str | None]:
        done = subprocess.run(
            ["node", str(tmp_path / "validate.mjs"), str(tmp_path)],
            input=json.dumps(given),
            capture_output=True,
            text=True,
        )
        assert not done.returncode, done.stderr
        found: list[str | None] = json.loads(done.stdout)
        return found

    assert wrong(objects) == [None] * 5
    # And they would be told if they did not.
    broken = {"controllerName": 5, "listeners": 5, "parentRefs": 5, "loadBalancer": 5}
    assert all(wrong([{**each, "spec": {**each["spec"], **broken}} for each in objects]))


@pytest.mark.soak
def test_ray_takes_its_config() -> None:
    schema = pytest.importorskip("ray.serve.schema", reason="Ray is not installed: make ray")
    [service] = [each for each in every() if each["kind"] == "RayService"]
    schema.ServeDeploySchema.model_validate(yaml.safe_load(service["spec"]["serveConfigV2"]))
