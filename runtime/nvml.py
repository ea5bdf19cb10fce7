"""What the GPU reports about itself: clocks, why they are held down, temperature, memory errors. Further evidence in a verdict
(analytics/health/gpu_evidence.py).

Asked of NVML through nvidia-ml-py (the extra `gpu`). Without the package, the driver or the GPU there is nothing to report:
None.
"""

from __future__ import annotations

from typing import Any

from unskew.collector.events import GpuState

_HELD = {
    "SwPowerCap": "power cap",
    "HwSlowdown": "hardware slowdown",
    "SwThermalSlowdown": "temperature, by software",
    "HwThermalSlowdown": "temperature, by hardware",
    "HwPowerBrakeSlowdown": "power brake",
    "SyncBoost": "sync boost group",
    "ApplicationsClocksSetting": "application clocks",
}


def gpu_state(rank: int, index: int, iteration: int | None = None) -> GpuState | None:
    """The state of GPU `index` of this node now. What the GPU does not support is None."""
    try:
        import pynvml as nvml  # type: ignore[import-untyped]  # noqa: PLC0415  - an extra
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        reasons = _asked(nvml, "nvmlDeviceGetCurrentClocksThrottleReasons", handle)
        return GpuState(
            rank=rank,
            iteration=iteration,
            clock_mhz=_asked(nvml, "nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_SM),
            highest_clock_mhz=_asked(nvml, "nvmlDeviceGetMaxClockInfo", handle, nvml.NVML_CLOCK_SM),
            held_down_by=tuple(
                words for name, words in _HELD.items() if reasons and reasons & getattr(nvml, f"nvmlClocksThrottleReason{name}")
            ),
            temperature_c=_asked(nvml, "nvmlDeviceGetTemperature", handle, nvml.NVML_TEMPERATURE_GPU),
            uncorrected_errors=_asked(
                nvml, "nvmlDeviceGetTotalEccErrors", handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_AGGREGATE_ECC
            ),
        )
    except nvml.NVMLError:
        return None


def gpu_models(gpus: int) -> tuple[tuple[str, int], ...]:
    """The models of this node's GPUs with their bytes of memory; () where NVML does not name them, or counts others than the
    `gpus` that are visible. Torch would have to take a GPU to tell, which needs a second."""
    try:
        import pynvml as nvml  # noqa: PLC0415  - an extra
    except ImportError:
        return ()
    try:
        nvml.nvmlInit()
        visible = range(gpus if nvml.nvmlDeviceGetCount() == gpus else 0)
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in visible]
        models = tuple((str(nvml.nvmlDeviceGetName(one)), int(nvml.nvmlDeviceGetMemoryInfo(one).total)) for one in handles)
        nvml.nvmlShutdown()
    except nvml.NVMLError:
        return ()
    return models


def _asked(nvml: Any, what: str, *arguments: Any) -> int | None:
    """One fact, None when this GPU does not know it."""
    try:
        return int(getattr(nvml, what)(*arguments))
    except nvml.NVMLError:
        return None
