"""TensorBoard's callback by the name that users know it by; `evcl.logs` has it."""

from evcl.logs import TensorBoard

__all__ = ["TensorBoard"]
