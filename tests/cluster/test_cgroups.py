"""Which hierarchies the kernel says there are."""

from __future__ import annotations

from pathlib import Path

from tests.cluster.cgroups import Hierarchy, hierarchies, mount_points

_MOUNTS = """\
30 24 0:26 / /sys/fs/cgroup ro,nosuid shared:9 - tmpfs tmpfs ro,mode=755
31 30 0:27 / /sys/fs/cgroup/unified rw,nosuid shared:10 - cgroup2 cgroup2 rw
32 30 0:28 / /sys/fs/cgroup/systemd rw,nosuid shared:11 - cgroup cgroup rw,xattr,name=systemd
33 30 0:31 / /sys/fs/cgroup/cpu,cpuacct rw,nosuid shared:15 - cgroup cgroup rw,cpu,cpuacct
34 30 0:32 /docker/1 /sys/fs/cgroup/memory rw,nosuid shared:16 - cgroup cgroup rw,memory
"""


def test_version_1_hierarchies_are_those_with_controllers() -> None:
    assert hierarchies("9:name=systemd:/\n5:cpu,cpuacct:/a:b\n0::/unified\n") == [
        Hierarchy(controllers="name=systemd", path="/"),
        Hierarchy(controllers="cpu,cpuacct", path="/a:b"),
    ]


def test_every_controller_of_a_hierarchy_is_found_where_the_whole_of_it_is_mounted() -> None:
    found = mount_points(_MOUNTS)
    assert found["cpu"] == found["cpuacct"] == Path("/sys/fs/cgroup/cpu,cpuacct")
    assert found["name=systemd"] == Path("/sys/fs/cgroup/systemd")
    assert "memory" not in found
