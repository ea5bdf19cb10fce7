"""What a GPU tells of itself. There is no GPU here: NVML is asked for real and has none; what it would say is a stand-in."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from unskew.collector.events import GpuState
from unskew.runtime.nvml import gpu_state

pynvml = pytest.importorskip("pynvml")


def test_without_a_driver_there_is_nothing_to_tell() -> None:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        assert gpu_state(3, 0) is None
    else:
        assert gpu_state(3, 0) is not None


def test_without_the_package_there_is_nothing_to_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpu_state(3, 0) is None


def test_a_hot_gpu_says_why_its_clock_is_held_down(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_ecc(*_: object) -> int:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)

    answers = {
        "nvmlInit": lambda: None,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetCurrentClocksThrottleReasons": lambda _: pynvml.nvmlClocksThrottleReasonHwThermalSlowdown,
        "nvmlDeviceGetClockInfo": lambda *_: 900,
        "nvmlDeviceGetMaxClockInfo": lambda *_: 1980,
        "nvmlDeviceGetTemperature": lambda *_: 91,
        "nvmlDeviceGetTotalEccErrors": no_ecc,
    }
    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(**{**vars(pynvml), **answers}))
    assert gpu_state(3, 0) == GpuState(
        rank=3,
        clock_mhz=900,
        highest_clock_mhz=1980,
        held_down_by=("temperature, by hardware",),
        temperature_c=91,
        uncorrected_errors=None,
    )
