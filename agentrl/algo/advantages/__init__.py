"""The bundled advantages, by name. numpy only: they run in the driver.

Invariant: a function gets a group and its options, and returns one [turns] float64 array for each episode, with exact zeros
where nothing is to be learned.
"""

from __future__ import annotations

from agentrl.algo.advantages.advantage_options import (
    EpisodeOptions,
    GaeOptions,
    GrpoOptions,
    OffPolicyOptions,
    OptimalBaselineOptions,
    PassAtKOptions,
    ReinforcePlusPlusOptions,
    TurnOptions,
)
from agentrl.algo.slots import Bundled

ADVANTAGES: dict[str, Bundled] = {
    "episode": Bundled(
        function="agentrl.algo.advantages.episodes:episode", options=EpisodeOptions, formula="R - mean of the group's R"
    ),
    "turn": Bundled(
        function="agentrl.algo.advantages.turn_returns:turn",
        options=TurnOptions,
        formula="G - mean of the other episodes' G at this depth, discount {discount}",
    ),
    "grpo": Bundled(
        function="agentrl.algo.advantages.episodes:grpo", options=GrpoOptions, formula="(R - mean) / (std + {epsilon})"
    ),
    "dr_grpo": Bundled(function="agentrl.algo.advantages.episodes:dr_grpo", formula="R - mean"),
    "rloo": Bundled(function="agentrl.algo.advantages.episodes:rloo", formula="R - mean of the others' R"),
    "reinforce_plus_plus": Bundled(
        function="agentrl.algo.advantages.episodes:reinforce_plus_plus",
        options=ReinforcePlusPlusOptions,
        formula="(R - baseline {baseline} - mean of the batch) / std of the batch",
        needs=frozenset({"batch"}),
    ),
    "max_rl": Bundled(function="agentrl.algo.advantages.episodes:max_rl", formula="(R - mean) / mean, 0 where mean <= 0"),
    "pass_at_k": Bundled(
        function="agentrl.algo.advantages.episodes:best_of_k",
        options=PassAtKOptions,
        formula="n * mean over sets of {k} of (max of the set - max without this episode), for sets with it",
    ),
    "optimal_baseline": Bundled(
        function="agentrl.algo.advantages.turn_returns:optimal_baseline",
        options=OptimalBaselineOptions,
        formula="G - sum of the others' W G / sum of their W, W = sum of (1 - p)^2",
    ),
    "off_policy_baseline": Bundled(
        function="agentrl.algo.advantages.episodes:off_policy_baseline",
        options=OffPolicyOptions,
        formula="R - sum of W^2 g R / sum of W^2 g, W = current / behavior of the episode, g = sum of (1 - p)^2",
        needs=frozenset({"logprobs"}),
    ),
    "turn_gae": Bundled(
        function="agentrl.algo.advantages.gae:turn_gae",
        options=GaeOptions,
        formula="sum over later turns of ({discount} * {trace})^l * (r + {discount} V' - V)",
        needs=frozenset({"values"}),
    ),
    "token_gae": Bundled(
        function="agentrl.algo.advantages.gae:token_gae",
        options=GaeOptions,
        formula="sum over later tokens of ({discount} * {trace})^l * (r + {discount} V' - V)",
        needs=frozenset({"values"}),
    ),
}
