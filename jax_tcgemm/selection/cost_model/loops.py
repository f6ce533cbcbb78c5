"""Estimated time of XLA's loops for elementwise functions."""

from jax_tcgemm.selection.cost_model.calibration import H200, Calibration


def loop_launch_us(num_bytes: float, calibration: Calibration = H200) -> float:
    """Return the launch time of an XLA loop that moves `num_bytes`, in microseconds."""
    share = min(num_bytes / calibration.loop_launch_bytes, 1.0)
    small = calibration.small_loop_us
    return small + share * (calibration.loop_launch_us - small)


def loop_us(
    num_bytes: int,
    elements: int,
    work: int,
    num_sms: int,
    calibration: Calibration = H200,
    *,
    is_launched: bool = True,
) -> float:
    """Estimate the time of XLA's loop for an elementwise function, in microseconds.

    Args:
      num_bytes: bytes that the loop reads and writes.
      elements: elements of each result.
      work: work per element, as in `Function.cost.loop`.
      num_sms: number of SMs of the device.
      calibration: the device's constants.
      is_launched: whether the loop is a kernel of its own, so that its launch counts.
    """
    arithmetic = elements / 1024 * work * calibration.loop_work_us / num_sms
    us = max(num_bytes / calibration.hbm_bytes_per_us, arithmetic)
    return us + (loop_launch_us(num_bytes, calibration) if is_launched else 0.0)
