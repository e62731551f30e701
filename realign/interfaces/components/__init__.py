"""Components of algorithms: advantages, objectives, corrections, penalties, shaping. Each file has one kind.

One module contains the base class of a kind and its built-in variants. Select a variant by its name in snake case:
`interfaces.actor.objective=gspo`. A custom component is a subclass of the base class in your own file:
`interfaces.actor.objective._target_=my_lab.topr.Topr`. Components import no interface.
"""

from realign.interfaces.components.advantages import (
    GAE,
    AdvantageEstimator,
    Estimate,
    Gdpo,
    GroupRelative,
    MaxRL,
    NStep,
    Rewards,
    TeacherKL,
    TurnGroup,
    TurnReturns,
    advantage_stats,
    normalize_advantages,
)
from realign.interfaces.components.aggregation import (
    Aggregation,
    Constant,
    SeqMeanTokenMean,
    SeqMeanTokenSum,
    TokenMean,
)
from realign.interfaces.components.correction import Correction, ImportanceCorrection, RatioRange, staleness_stats
from realign.interfaces.components.divergence import JSD, Divergence, ForwardKL, ReverseKL
from realign.interfaces.components.early_stop import EarlyStop
from realign.interfaces.components.entropy import EntropyBonus
from realign.interfaces.components.kl import KLControl, KLPenalty, KLPlace
from realign.interfaces.components.normalization import Normalization
from realign.interfaces.components.objectives import (
    POLICY_PANELS,
    Cispo,
    Clip,
    Dppo,
    Gmpo,
    Gspo,
    Objective,
    PolicyTokens,
    ProximalKL,
    Reinforce,
    Sapo,
    policy_loss_of,
    policy_stats,
)
from realign.interfaces.components.pretraining import mix_pretraining, pretraining_loss
from realign.interfaces.components.reward_shaping import RewardBaseline, RewardScale, RewardShaping
from realign.interfaces.components.scoring import first_logprob_diff, old_logprobs, score_logprobs, scoring_keys
from realign.interfaces.components.truncation import TruncatedReward, Truncation
from realign.interfaces.components.value_loss import VALUE_PANELS, Critic, ValueObjective, select_trained, value_stats

__all__ = [
    "GAE",
    "JSD",
    "POLICY_PANELS",
    "VALUE_PANELS",
    "AdvantageEstimator",
    "Aggregation",
    "Cispo",
    "Clip",
    "Constant",
    "Correction",
    "Critic",
    "Divergence",
    "Dppo",
    "EarlyStop",
    "EntropyBonus",
    "Estimate",
    "ForwardKL",
    "Gdpo",
    "Gmpo",
    "GroupRelative",
    "Gspo",
    "ImportanceCorrection",
    "KLControl",
    "KLPenalty",
    "KLPlace",
    "MaxRL",
    "NStep",
    "Normalization",
    "Objective",
    "PolicyTokens",
    "ProximalKL",
    "RatioRange",
    "Reinforce",
    "ReverseKL",
    "RewardBaseline",
    "RewardScale",
    "RewardShaping",
    "Rewards",
    "Sapo",
    "SeqMeanTokenMean",
    "SeqMeanTokenSum",
    "TeacherKL",
    "TokenMean",
    "TruncatedReward",
    "Truncation",
    "TurnGroup",
    "TurnReturns",
    "ValueObjective",
    "advantage_stats",
    "first_logprob_diff",
    "mix_pretraining",
    "normalize_advantages",
    "old_logprobs",
    "policy_loss_of",
    "policy_stats",
    "pretraining_loss",
    "score_logprobs",
    "scoring_keys",
    "select_trained",
    "staleness_stats",
    "value_stats",
]
