"""Template, identity and objects -> ``PodPlan``: environment, arguments, volumes and paths all resolved. Pure.

``shutil.which`` is the one look at the machine, through ``ProcessImage.find``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from kvloop.node.errors import UnsupportedManifest
from kvloop.node.expansion import expand
from kvloop.node.images import ProcessImage
from kvloop.node.model import (
    ContainerPlan,
    ContainerTemplate,
    Exec,
    FieldFiles,
    FieldRef,
    KeyRef,
    Literal,
    Mount,
    ObjectFiles,
    Objects,
    PlannedFile,
    PodIdentity,
    PodPlan,
    PodTemplate,
    Probe,
    Probes,
    Volume,
)

Action = TypeVar("Action")

_LABEL = re.compile(r"metadata\.(labels|annotations)\['([^']+)'\]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where pods live on this machine.

    host_paths: absolute paths that mean the machine's own file wherever they occur, even below a mount path.
    """

    directory: Path
    images: Mapping[str, ProcessImage]
    host_paths: tuple[Path, ...] = ()


def plan_pod(template: PodTemplate, identity: PodIdentity, *, objects: Objects, place: Place) -> PodPlan:
    """Everything that the pod's start needs. Raises ``UnsupportedManifest`` for a reference that leads nowhere."""
    context = _Context(template=template, identity=identity, objects=objects, place=place)
    containers = tuple(context.container(container) for container in template.containers)
    init_containers = tuple(context.container(container) for container in template.init_containers)
    files = tuple(file for volume in template.volumes for file in context.files(volume))
    volumes = [context.volume_directory(volume.name) for volume in template.volumes]
    mounts = [mount for c in (*template.init_containers, *template.containers) for mount in c.mounts]
    written = {file.path for file in files}
    # A subPath that no key of the volume provides is made as an empty directory, as the kubelet does.
    sub_paths = [path for path in map(context.mount_target, mounts) if path not in written]
    return PodPlan(
        identity=identity,
        labels=template.labels,
        directory=context.directory,
        directories=tuple(dict.fromkeys([context.home, *volumes, *sub_paths])),
        files=files,
        init_containers=init_containers,
        containers=containers,
        restart_policy=template.restart_policy,
        grace=template.grace,
    )


def path_rewriter(targets: Mapping[str, Path], untouched: Sequence[Path]) -> Callable[[str], str]:
    """A function that replaces mount paths in a text by the directories that stand for them.

    A path counts where a path begins (not behind a letter, a digit or another part of a path) and where its last part
    ends.
    The longest mount path wins; whatever begins with one of ``untouched`` stays.
    """
    replacements = {str(path): str(path) for path in untouched} | {path: str(to) for path, to in targets.items()}
    if not replacements:
        return lambda text: text
    longest_first = sorted(replacements, key=len, reverse=True)
    # An untouched path takes its whole tail along, so that a mount path inside it is not seen again.
    kept = {str(path) for path in untouched}
    alternatives = "|".join(re.escape(path) + (r"(?:/[^\s\"':,;]*)?" if path in kept else "") for path in longest_first)
    pattern = re.compile(rf"(?<![\w./-])({alternatives})(?![\w.-])")
    return lambda text: pattern.sub(lambda match: replacements.get(match[1], match[1]), text)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Context:
    template: PodTemplate
    identity: PodIdentity
    objects: Objects
    place: Place

    @property
    def directory(self) -> Path:
        return self.place.directory / f"{self.identity.name}.{self.identity.uid[:8]}"

    @property
    def home(self) -> Path:
        return self.directory / "home"

    def volume_directory(self, volume: str) -> Path:
        return self.directory / "volumes" / volume

    def mount_target(self, mount: Mount) -> Path:
        return self.volume_directory(mount.volume) / mount.sub_path

    def container(self, template: ContainerTemplate) -> ContainerPlan:
        image = self.place.images.get(template.image)
        if image is None:
            raise UnsupportedManifest(f"{template.at}.image", f"no process stands for the image {template.image!r}")
        rewrite = self._rewriter(template.mounts)
        own = dict(self._environment(template))
        words = [expand(word, own) for word in (*(template.command or ()), *(template.args or ()))]
        if template.command is None:
            words = [*image.entrypoint, *words]
        if not words:
            raise UnsupportedManifest(f"{template.at}.command", "is required: the image has no entrypoint")
        argv = [rewrite(word) for word in words]
        program = image.find(argv[0])
        if program is None:
            raise UnsupportedManifest(
                f"{template.at}.command", f"{argv[0]!r} is not on the path of the image {template.image!r}"
            )
        base = {
            "PATH": image.search_path,
            "HOME": str(self.home),
            "HOSTNAME": self.identity.name,
            "LANG": "C.UTF-8",
            **image.environment,
        }
        return ContainerPlan(
            name=template.name,
            image=template.image,
            argv=(program, *argv[1:]),
            environment=base | {name: rewrite(value) for name, value in own.items()},
            working_dir=Path(rewrite(template.working_dir)) if template.working_dir else self.home,
            ports=template.ports,
            probes=_rewrite_probes(template.probes, lambda word: rewrite(expand(word, own))),
            pre_stop=_rewrite_command(template.pre_stop, rewrite),
        )

    def files(self, volume: Volume) -> Iterator[PlannedFile]:
        """The files of a volume. Mount paths in ConfigMap texts are rewritten for the containers that mount it."""
        mounts = [
            mount
            for container in (*self.template.init_containers, *self.template.containers)
            if any(mount.volume == volume.name for mount in container.mounts)
            for mount in container.mounts
        ]
        rewrite = self._rewriter(mounts)
        directory = self.volume_directory(volume.name)
        for source in volume.sources:
            if isinstance(source, FieldFiles):
                for path, reference in source.items:
                    content = self._field(reference).encode()
                    yield PlannedFile(path=directory / path, content=content, mode=source.mode)
                continue
            for path, content in self._object_files(source):
                if source.kind == "ConfigMap":
                    content = _rewrite_text(content, rewrite)
                yield PlannedFile(path=directory / path, content=content, mode=source.mode)

    def _rewriter(self, mounts: Sequence[Mount]) -> Callable[[str], str]:
        targets: dict[str, Path] = {}
        for mount in mounts:
            target = self.mount_target(mount)
            if targets.setdefault(mount.path, target) != target:
                raise UnsupportedManifest(
                    mount.at, f"{mount.path} is mounted from two places, which a text that names it cannot tell apart"
                )
        return path_rewriter(targets, (self.place.directory, *self.place.host_paths))

    def _environment(self, template: ContainerTemplate) -> Iterator[tuple[str, str]]:
        values: dict[str, str] = {}
        for source in template.env_from:
            data = self.objects.find(source.kind, self.identity.namespace, source.name)
            if data is None and not source.optional:
                raise UnsupportedManifest(source.at, f"there is no {source.kind} {source.name!r}")
            values.update({source.prefix + key: value.decode() for key, value in (data or {}).items()})
        for variable in template.env:
            if isinstance(variable.source, Literal):
                values[variable.name] = expand(variable.source.text, values)
            elif isinstance(variable.source, FieldRef):
                values[variable.name] = self._field(variable.source)
            elif (text := self._key(variable.source)) is not None:
                values[variable.name] = text
        yield from values.items()

    def _key(self, reference: KeyRef) -> str | None:
        data = self.objects.find(reference.kind, self.identity.namespace, reference.name)
        if data is not None and reference.key in data:
            return data[reference.key].decode()
        if reference.optional:
            return None
        missing = "there is no" if data is None else f"no key {reference.key!r} in"
        raise UnsupportedManifest(reference.at, f"{missing} {reference.kind} {reference.name!r}")

    def _object_files(self, source: ObjectFiles) -> Iterator[tuple[str, bytes]]:
        data = self.objects.find(source.kind, self.identity.namespace, source.name)
        if data is None:
            if not source.optional:
                raise UnsupportedManifest(source.at, f"there is no {source.kind} {source.name!r}")
            return
        if not source.items:
            yield from data.items()
            return
        for item in source.items:
            if item.key in data:
                yield item.path, data[item.key]
            elif not source.optional:
                raise UnsupportedManifest(source.at, f"no key {item.key!r} in {source.kind} {source.name!r}")

    def _field(self, reference: FieldRef) -> str:
        identity = self.identity
        simple = {
            "metadata.name": identity.name,
            "metadata.namespace": identity.namespace,
            "metadata.uid": identity.uid,
            "spec.nodeName": identity.node_name,
            "spec.serviceAccountName": self.template.service_account,
            "status.podIP": identity.address,
            "status.podIPs": identity.address,
            "status.hostIP": identity.host_address,
            "status.hostIPs": identity.host_address,
        }
        if reference.field_path in simple:
            return simple[reference.field_path]
        if match := _LABEL.fullmatch(reference.field_path):
            values = self.template.labels if match[1] == "labels" else self.template.annotations
            return values.get(match[2], "")
        raise UnsupportedManifest(reference.at, f"the local node does not know the field {reference.field_path!r}")


def _rewrite_text(content: bytes, rewrite: Callable[[str], str]) -> bytes:
    try:
        return rewrite(content.decode()).encode()
    except UnicodeDecodeError:
        return content


def _rewrite_command(action: Action, rewrite: Callable[[str], str]) -> Action:
    if isinstance(action, Exec):
        return replace(action, command=tuple(rewrite(word) for word in action.command))
    return action


def _rewrite_probes(probes: Probes, rewrite: Callable[[str], str]) -> Probes:
    def one(probe: Probe | None) -> Probe | None:
        return None if probe is None else replace(probe, check=_rewrite_command(probe.check, rewrite))

    return Probes(startup=one(probes.startup), readiness=one(probes.readiness), liveness=one(probes.liveness))
