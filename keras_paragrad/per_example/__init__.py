"""Per-example gradients, and the rules that compute them for each kind of layer."""

from typing import TYPE_CHECKING

from keras_paragrad.exports import lazily

if TYPE_CHECKING:
    from keras_paragrad.per_example.calls import Call
    from keras_paragrad.per_example.example_gradients import ExampleGradients
    from keras_paragrad.per_example.functional import per_example_gradients, per_example_norms
    from keras_paragrad.per_example.noise_scale import GradientNoiseScale
    from keras_paragrad.per_example.rule import Rule, register_rule
    from keras_paragrad.per_example.rules.generic import Generic
    from keras_paragrad.per_example.wrapped_model import wrap
    from keras_paragrad.per_example.wrapper import PerExampleGradients

__all__ = [
    "Call",
    "ExampleGradients",
    "Generic",
    "GradientNoiseScale",
    "PerExampleGradients",
    "Rule",
    "per_example_gradients",
    "per_example_norms",
    "register_rule",
    "wrap",
]
__getattr__, __dir__ = lazily(
    __name__,
    {
        "Call": "calls",
        "ExampleGradients": "example_gradients",
        "Generic": "rules.generic",
        "GradientNoiseScale": "noise_scale",
        "PerExampleGradients": "wrapper",
        "Rule": "rule",
        "per_example_gradients": "functional",
        "per_example_norms": "functional",
        "register_rule": "rule",
        "wrap": "wrapped_model",
    },
)
