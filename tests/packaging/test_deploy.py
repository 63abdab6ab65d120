"""The files to deploy with: what can be known of them without a cluster."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from configparser import ConfigParser
from pathlib import Path
from typing import Any

import pytest
import yaml
from django.core.management import get_commands, load_command_class

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "docs" / "deploy"
PAGE = ROOT / "docs" / "how-to" / "deploy.md"
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
MANIFESTS = [
    pytest.param(document, id=f"{path.stem}-{document['kind']}")
    for path in sorted((DEPLOY / "kubernetes").glob("*.yaml"))
    for document in yaml.safe_load_all(path.read_text())
]
UNITS = sorted((DEPLOY / "systemd").iterdir())


def schema_of(module: str) -> Any:
    """Import what knows a schema; where tests may leave something out, without it."""
    if importlib.util.find_spec(module) is None and not os.environ.get("CI"):
        pytest.skip(f"{module} is not installed: pip install --group dev --group release")
    return importlib.import_module(module)


def commands(of: Any) -> Iterator[list[str]]:
    """Find every ``manage.py …`` in what a file holds."""
    if isinstance(of, dict):
        of = list(of.values())
    if isinstance(of, str):
        for found in re.findall(r"manage\.py ([^;&\n`)]+)", of):
            yield shlex.split(found)
    elif isinstance(of, list):
        if "manage.py" in of:
            yield of[of.index("manage.py") + 1 :]
        else:
            for each in of:
                yield from commands(each)


def test_compose_is_what_its_schema_says() -> None:
    schema_of("compose_spec").ComposeSpecification.model_validate(COMPOSE)


def test_compose_names_only_what_it_declares() -> None:
    services = COMPOSE["services"]
    for name, service in services.items():
        assert set(service.get("depends_on", ())) <= set(services), name
        assert set(service.get("secrets", ())) <= set(COMPOSE["secrets"])
        for source, *_ in (volume.split(":") for volume in service.get("volumes", ())):
            is_file = source.startswith(".")
            assert (DEPLOY / source).is_file() if is_file else source in COMPOSE["volumes"]
        if build := service.get("build"):
            context = (DEPLOY / build["context"]).resolve()
            assert context == ROOT and (context / build["dockerfile"]).is_file()


@pytest.mark.large  # the schemas of every version of Kubernetes take 110 MB
@pytest.mark.parametrize("manifest", MANIFESTS)
def test_manifests_are_what_their_schemas_say(manifest: dict[str, Any]) -> None:
    if manifest["kind"] == "ScaledObject":  # KEDA's own, of which no package has the schema
        assert manifest["spec"]["minReplicaCount"] < manifest["spec"]["maxReplicaCount"]
    else:
        schema_of("kubernetes_validate").validate(manifest, "1.32", strict=True)


def test_manifests_name_one_another() -> None:
    documents = [param.values[0] for param in MANIFESTS]
    deployments = {
        each["metadata"]["name"]: each for each in documents if each["kind"] == "Deployment"
    }
    for each in documents:
        spec = each.get("spec", {})
        if each["kind"] in ("PodDisruptionBudget", "Service"):
            selector = spec["selector"].get("matchLabels", spec["selector"])
            template = deployments[each["metadata"]["name"]]["spec"]["template"]
            assert selector == template["metadata"]["labels"]
        elif each["kind"] == "ScaledObject":
            assert spec["scaleTargetRef"]["name"] in deployments
            metrics = (ROOT / "docs/how-to/monitoring.md").read_text()
            for trigger in spec["triggers"]:
                for metric in re.findall(r"kjo_\w+", trigger["metadata"]["query"]):
                    assert f"`{metric}`" in metrics


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.name)
def test_units_have_their_sections(path: Path) -> None:
    unit = ConfigParser(interpolation=None, strict=True)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(path.read_text())
    assert set(unit.sections()) <= {"Unit", "Service", "Timer", "Install"}
    assert unit["Unit"]["Description"]


def test_systemd_reads_the_units(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd is not installed")
    for path in UNITS:  # whose program is elsewhere here
        text = re.sub(r"ExecStart=\S+", f"ExecStart={sys.executable}", path.read_text())
        (tmp_path / path.name).write_text(text.replace("User=shop", "User=root"))
    names = [str(tmp_path / path.name.replace("@.", "@1.")) for path in UNITS]
    (tmp_path / "kjo-worker@1.service").symlink_to(tmp_path / "kjo-worker@.service")
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *names], capture_output=True, text=True
    )
    said = [line for line in done.stderr.splitlines() if "kjo-" in line]
    assert not said


def test_every_command_is_one_with_these_arguments() -> None:
    texts: list[Any] = [COMPOSE, PAGE.read_text(), *(param.values[0] for param in MANIFESTS)]
    texts += [line for path in UNITS for line in re.findall(r"ExecStart=.*", path.read_text())]
    found = [command for text in texts for command in commands(text)]
    known = get_commands()
    for name, *arguments in found:
        app = known[name]
        command = load_command_class(app, name) if isinstance(app, str) else app
        command.create_parser("manage.py", name).parse_args(arguments)
    assert {"migrate", "kjo_consume", "kjo_produce"} <= {name for name, *_ in found}


def test_the_settings_are_right_with_the_environment_of_compose() -> None:
    given = COMPOSE["x-app"]["environment"]
    declared = (ROOT / "example_project" / "settings.py").read_text()
    assert not [name for name in given if f'"{name}"' not in declared]
    filled = {name: re.sub(r"\$\{[^}]+\}", "x" * 50, value) for name, value in given.items()}
    done = subprocess.run(
        [sys.executable, "manage.py", "check", "--tag", "kjo", "--fail-level", "WARNING"],
        cwd=ROOT,
        env={**os.environ, **filled, "DJANGO_SETTINGS_MODULE": "example_project.settings"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_the_image_copies_what_there_is_and_installs_extras_there_are() -> None:
    lines = (DEPLOY / "Dockerfile").read_text().splitlines()
    copied = [name for line in lines if line.startswith("COPY ") for name in line.split()[1:-1]]
    assert copied and all((ROOT / name).exists() for name in copied)
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    assert {f"!{name}" for name in copied} <= set(ignored)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (extras,) = re.findall(r'"\.\[([\w,]+)\]"', "\n".join(lines))
    assert set(extras.split(",")) <= set(project["optional-dependencies"])
    (start,) = [line for line in lines if line.startswith("CMD ")]
    assert isinstance(yaml.safe_load(start.removeprefix("CMD ")), list)


def test_the_page_links_every_file() -> None:
    page = PAGE.read_text()
    files = [path for path in DEPLOY.rglob("*") if path.is_file()]
    assert not [
        path.name
        for path in files
        if f"(../{path.relative_to(DEPLOY.parent)})" not in page and path.suffix != ".dockerignore"
    ]
