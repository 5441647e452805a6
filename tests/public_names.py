"""The modules whose names are public: all of `__all__`, or those that are listed here."""

PACKAGES = "benchmarks callbacks experiments integrations targets methods metrics nn rl sklearn streams streams.sources"
MODULES = ("evcl", *(f"evcl.{name}" for name in PACKAGES.split()))
PARTLY = {  # of these modules, only some names are public, or they cannot be imported everywhere
    "evcl.integrations.avalanche": ["LearnerStrategy", "PenaltyPlugin", "from_avalanche", "to_avalanche"],
    "evcl.integrations.continuum": ["from_continuum"],
    "evcl.integrations.laplace": ["from_laplace"],
    "evcl.integrations.lightning": ["PenaltyCallback"],
    "evcl.integrations.river": ["StreamClassifier", "StreamRegressor"],
    "evcl.integrations.transformers": ["PenaltyCallback"],
    "evcl.training": ["joined"],
}
