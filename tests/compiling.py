"""Context managers that observe what JAX compiles, or cache it."""

import contextlib

import jax
from jax.experimental.compilation_cache import compilation_cache


@contextlib.contextmanager
def compilations(*, and_traces=False):
    """A list of what this process compiles while in the context: the name of JAX's event each time."""
    events, names = [], ("backend_compile", "trace") if and_traces else ("backend_compile",)

    def listen(event, *_, **__):
        if any(name in event for name in names):
            events.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield events
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@contextlib.contextmanager
def persistent_cache(folder, **settings):
    """Keeps all that is compiled while in the context in a folder, whatever little time it takes."""
    settings |= dict(
        jax_compilation_cache_dir=str(folder),
        jax_persistent_cache_min_compile_time_secs=0,
        jax_persistent_cache_min_entry_size_bytes=0,
    )
    before = {name: getattr(jax.config, name) for name in settings}
    try:
        for name, value in settings.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
