"""What a plan decides of a launch besides the kernel and the schedule.

cutlass_kernels/planner/launch_policy.cc decides it.
"""

import dataclasses

from jax_streamk import _ffi

_RASTERS = {"m": _ffi.Raster.along_m, "n": _ffi.Raster.along_n}


@dataclasses.dataclass(frozen=True)
class LaunchPolicy:
    """How a kernel is launched, which decides how long that takes, and not what it computes.

    Only the last bits of a Stream-K product may change with the order of tiles. Kernels of the sm90 family have all of
    a policy, those of the skinny family the order of tiles and the hint for B, others the order of tiles.

    Attributes:
      raster: along which dimension of the result, "m" or "n", consecutive tiles lie.
      swizzle: how many tiles wide the panels are in which they do.
      evict_first_a, evict_first_b: whether loads of A or B hint that their lines leave L2 first.
      held_back: stages of each CTA that its loads leave empty, so that less is on its way from memory at once.
      held_back_last: the same in a last wave that is partial.
      idle_clusters: clusters launched besides those that work, which exit at once and keep some SMs free.
      cluster_order: which worker each cluster is: "as_launched", "by_gpc" (neighbours share a GPC) or "spread".
      extend_a, extend_b: whether TMA may read A or B up to whole tiles, where its allocation goes on so far.
    """

    raster: str = "m"
    swizzle: int = 1
    evict_first_a: bool = False
    evict_first_b: bool = False
    held_back: int = 0
    held_back_last: int = 0
    idle_clusters: int = 0
    cluster_order: str = "as_launched"
    extend_a: bool = False
    extend_b: bool = False

    @classmethod
    def of(cls, native):
        """That of an ``_ffi.LaunchPolicy``."""
        fields = {field.name: getattr(native, field.name) for field in dataclasses.fields(cls)}
        raster = "m" if native.raster == _ffi.Raster.along_m else "n"
        return cls(**fields | dict(raster=raster, cluster_order=native.cluster_order.name))

    def attributes(self):
        """In the words of ``_ffi.LaunchPolicy`` and of the custom call's attributes, which are the same."""
        return vars(self) | dict(raster=_RASTERS[self.raster], cluster_order=_ffi.ClusterOrder[self.cluster_order])

    def native(self):
        return _ffi.LaunchPolicy(**self.attributes())

    def __str__(self):
        parts = [f"raster along {self.raster}"]
        if self.swizzle > 1:
            parts.append(f"swizzle {self.swizzle}")
        if first := _operands(self.evict_first_a, self.evict_first_b):
            parts.append(f"{first} evict first")
        if self.held_back:
            last = f" ({self.held_back_last} in the last wave)" if self.held_back_last != self.held_back else ""
            parts.append(f"{_count(self.held_back, 'stage')} held back{last}")
        if self.idle_clusters:
            parts.append(_count(self.idle_clusters, "idle cluster"))
        if self.cluster_order != "as_launched":
            parts.append("clusters by GPC" if self.cluster_order == "by_gpc" else "clusters spread over GPCs")
        if extended := _operands(self.extend_a, self.extend_b):
            parts.append(f"{extended} extended to whole tiles")
        return ", ".join(parts)


def _operands(a, b):
    return " and ".join(name for name, has_it in (("A", a), ("B", b)) if has_it)


def _count(number, noun):
    return f"{number} {noun}" + "s" * (number != 1)
