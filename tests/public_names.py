"""The modules whose names are public: all of `__all__`, or those that are listed here."""

MODULES = (
    "evcl",
    "evcl.benchmarks",
    "evcl.callbacks",
    "evcl.experiments",
    "evcl.integrations",
    "evcl.targets",
    "evcl.methods",
    "evcl.metrics",
    "evcl.nn",
    "evcl.rl",
    "evcl.sklearn",
    "evcl.streams",
    "evcl.streams.sources",
)
PARTLY = {  # of these modules, only some names are public, or they cannot be imported everywhere
    "evcl.integrations.avalanche": ["LearnerStrategy", "PenaltyPlugin", "from_avalanche", "to_avalanche"],
    "evcl.integrations.continuum": ["from_continuum"],
    "evcl.integrations.laplace": ["from_laplace"],
    "evcl.integrations.lightning": ["PenaltyCallback"],
    "evcl.integrations.river": ["StreamClassifier", "StreamRegressor"],
    "evcl.integrations.transformers": ["PenaltyCallback"],
    "evcl.training": ["joined"],
}
