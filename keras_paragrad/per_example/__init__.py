"""Gradients of single examples."""

from keras_paragrad.per_example import rules
from keras_paragrad.per_example.registry import Call, Rule, register_rule
from keras_paragrad.per_example.rules.generic import Generic

__all__ = ["Call", "Generic", "Rule", "register_rule", "rules"]
