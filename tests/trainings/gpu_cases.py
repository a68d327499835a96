"""Cases for `benchmarks/gpu.py` of which all but the first go wrong, each in a way of its own."""

import os
import time

from gpu_parts.case import Cases, Line, Machine, check

TENSORFLOW = False
cases = Cases()


@cases("holds")
def holds(machine: Machine) -> Line:
    return check(0.5, 1.0)


@cases("is off")
def is_off(machine: Machine) -> Line:
    return check(float("nan"), 1.0)


@cases("raises")
def raises(machine: Machine) -> Line:
    raise ValueError("the reason")


@cases("hangs", seconds=0.1)
def hangs(machine: Machine) -> Line:
    time.sleep(3600)
    return check(0, 1)


@cases("returns nothing")
def returns_nothing(machine: Machine) -> None:
    return None


@cases("ends its process")
def ends_its_process(machine: Machine) -> Line:
    os._exit(0)


@cases("comes after them")
def comes_after_them(machine: Machine) -> Line:
    return check(0, 1)
