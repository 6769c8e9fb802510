"""The choices of a launch besides kernel and schedule. cutlass_kernels/planner/launch_policy.cc makes them."""

import dataclasses
import operator

from jax_streamk import _ffi

_RASTERS = {"m": _ffi.Raster.along_m, "n": _ffi.Raster.along_n}


@dataclasses.dataclass(frozen=True)
class LaunchPolicy:
    """How a kernel is launched. It affects the time of a call, not its result.

    The exception is the order of tiles, which may change the last bits of a Stream-K product. Kernels of the sm90
    family use every field, those of the skinny family the order of tiles and the hint for B, others only the order of
    tiles.

    Attributes:
      raster: the dimension of the result along which consecutive tiles lie, "m" or "n".
      swizzle: the width, in tiles, of the panels in which tiles are ordered.
      evict_first_a: whether loads of A tell L2 to evict their lines first.
      evict_first_b: the same of B.
      held_back: stages per CTA that are left empty, to limit the bytes in flight from memory.
      held_back_last: the same in a partial last wave.
      idle_clusters: extra clusters that exit at once, to balance a partial wave over the GPCs.
      cluster_order: how clusters are numbered: "as_launched", "by_gpc" (neighbours share a GPC) or "spread".
      extend_a: whether TMA may read A to the end of its last tile, within its allocation.
      extend_b: the same of B.
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
        """From an ``_ffi.LaunchPolicy``."""
        fields = dict(zip(_NAMES, _values(native), strict=True))
        fields["raster"] = "m" if native.raster == _ffi.Raster.along_m else "n"
        fields["cluster_order"] = native.cluster_order.name
        return cls(**fields)

    def attributes(self):
        """The fields of ``_ffi.LaunchPolicy``, which are also attributes of the custom call."""
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


_NAMES = [field.name for field in dataclasses.fields(LaunchPolicy)]
_values = operator.attrgetter(*_NAMES)


def _operands(a, b):
    return " and ".join(name for name, has_it in (("A", a), ("B", b)) if has_it)


def _count(number, noun):
    return f"{number} {noun}" + "s" * (number != 1)
