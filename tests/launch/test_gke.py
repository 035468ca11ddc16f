"""GKE: the manifest, as YAML reads it."""

from collections.abc import Callable
from typing import Any

import pytest
import yaml

Launch = Callable[..., Any]


def manifest(launch: Launch, *flags: str, command: tuple[str, ...] = ("python", "a.py")) -> Any:
    done = launch("gke", "--image", "repo/image:tag", *flags, "--", *command)
    assert done.code == 0, done.err
    return yaml.safe_load(done.out)


def job(found: Any) -> Any:
    (replicated,) = found["spec"]["replicatedJobs"]
    return replicated["template"]["spec"]


def container(found: Any) -> Any:
    (only,) = job(found)["template"]["spec"]["containers"]
    return only


@pytest.mark.parametrize(
    ("name", "hosts", "chips", "label", "topology"),
    [
        ("v6e-16", 4, 4, "tpu-v6e-slice", "4x4"),
        ("v6e-8", 1, 8, "tpu-v6e-slice", "2x4"),
        ("v5e-16", 4, 4, "tpu-v5-lite-podslice", "4x4"),
        ("v5p-16", 2, 4, "tpu-v5p-slice", "2x2x2"),
        ("v4-16", 2, 4, "tpu-v4-podslice", "2x2x2"),
    ],
)
def test_a_pod_on_every_host_with_all_its_chips(
    launch: Launch, name: str, hosts: int, chips: int, label: str, topology: str
) -> None:
    found = manifest(launch, "--type", name)
    assert (found["apiVersion"], found["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    of_job = job(found)
    assert (of_job["parallelism"], of_job["completions"]) == (hosts, hosts)
    assert (of_job["completionMode"], of_job["backoffLimit"]) == ("Indexed", 0)
    assert of_job["template"]["spec"]["restartPolicy"] == "Never"
    assert of_job["template"]["spec"]["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": label,
        "cloud.google.com/gke-tpu-topology": topology,
    }
    resources = container(found)["resources"]
    assert resources["requests"] == resources["limits"] == {"google.com/tpu": chips}
    assert {"name": "GRPO_EQX_REQUIRE_PROCESSES", "value": str(hosts)} in container(found)["env"]


def test_pods_find_each_other_and_fail_together(launch: Launch) -> None:
    spec = manifest(launch, "--type", "v6e-16", "--name", "my-run", "--max-restarts", "2")["spec"]
    assert spec["network"] == {"enableDNSHostnames": True, "subdomain": "my-run"}
    assert spec["failurePolicy"]["maxRestarts"] == 2
    rule = {"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    assert spec["failurePolicy"]["rules"] == [{"name": "impossible", **rule}]


def test_secrets_come_from_a_secret(launch: Launch) -> None:
    assert "envFrom" not in container(manifest(launch, "--type", "v6e-8"))
    found = container(manifest(launch, "--type", "v6e-8", "--secret", "tokens"))
    assert found["envFrom"] == [{"secretRef": {"name": "tokens"}}]


def test_arguments_arrive_as_they_are(launch: Launch, hostile: tuple[str, ...]) -> None:
    found = manifest(launch, "--type", "v6e-8", command=("python", *hostile))
    arguments = container(found)["command"]
    assert [argument.replace("$$", "$") for argument in arguments] == ["python", *hostile]


def test_a_claim_is_mounted_where_output_dir_can_be(launch: Launch) -> None:
    found = manifest(launch, "--type", "v6e-16", "--claim", "runs")
    (mount,) = container(found)["volumeMounts"]
    (volume,) = job(found)["template"]["spec"]["volumes"]
    assert mount == {"name": volume["name"], "mountPath": "/shared"}
    assert volume["persistentVolumeClaim"] == {"claimName": "runs"}
    assert "volumes" not in job(manifest(launch, "--type", "v6e-16"))["template"]["spec"]


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--claim", "A b"),
        ("--name", "x: y"),
        ("--name", "A"),
        ("--secret", "a b"),
        ("--max-restarts", "-1"),
    ],
)
def test_what_kubernetes_would_refuse_is_refused(launch: Launch, flag: str, value: str) -> None:
    done = launch("gke", "--image", "i", "--type", "v6e-8", f"{flag}={value}", "--", "true")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith(f"error: {flag} is ")


def test_the_image_is_quoted(launch: Launch) -> None:
    done = launch("gke", "--image", 'a"\nb: c', "--type", "v6e-8", "--", "true")
    assert container(yaml.safe_load(done.out))["image"] == 'a"\nb: c'
