"""The components that come with Etude, by registry and key, as `module:attribute` under `etude`."""

from __future__ import annotations

from typing import Final

# fmt: off
BUILTINS: Final[dict[str, dict[str, str]]] = {
    "policies": {
        "act": "policies.act:ACT",
        "actor_critic": "policies.actor_critic:ActorCritic",
        "diffusion": "policies.diffusion:Diffusion",
        "flow": "policies.flow:FlowMatching",
        "language": "policies.language.build:language_model",
        "mlp": "policies.mlp:MLP",
    },
    "data": {
        "digits": "data.digits:Digits",
        "environment_rollouts": "rollouts.explore:EnvironmentRollouts",
        "lerobot": "data.module:LeRobotDataModule",
        "rollouts": "rollouts.text:TextRollouts",
        "text": "data.text:TextData",
    },
    "algorithms": {
        "bc": "algorithms.bc:BehaviorCloning",
        "cispo": "algorithms.grpo:CISPO",
        "distillation": "algorithms.distillation:Distillation",
        "dpo": "algorithms.preference:DPO",
        "dr_grpo": "algorithms.grpo:DrGRPO",
        "dro": "algorithms.grpo:DRO",
        "gkd": "algorithms.gkd:GKD",
        "gmpo": "algorithms.grpo:GMPO",
        "grpo": "algorithms.grpo:GRPO",
        "gspo": "algorithms.grpo:GSPO",
        "ipo": "algorithms.preference:IPO",
        "kto": "algorithms.kto:KTO",
        "opo": "algorithms.reinforce:OPO",
        "orpo": "algorithms.preference:ORPO",
        "ppo": "algorithms.ppo:PPO",
        "reinforce_plus_plus": "algorithms.reinforce:ReinforcePlusPlus",
        "remax": "algorithms.reinforce:ReMax",
        "reward_model": "algorithms.reward_model:RewardModel",
        "rloo": "algorithms.reinforce:RLOO",
        "sapo": "algorithms.grpo:SAPO",
        "sft": "algorithms.sft:SFT",
        "simpo": "algorithms.preference:SimPO",
    },
    "loggers": {
        "tensorboard": "runs.loggers:TensorBoardLogger",
        "wandb": "runs.loggers:WandbLogger",
        "mlflow": "runs.loggers:MlflowLogger",
        "trackio": "runs.loggers:TrackioLogger",
    },
    "callbacks": {
        "evaluate_in_simulation": "simulation.callback:EvaluateInSimulation",
        "evaluate_rewards": "rollouts.reward_callback:EvaluateRewards",
    },
    "environments": {
        "aloha": "simulation.environments.aloha:Aloha",
        "gym": "simulation.environments.gym:GymEnvironment",
        "metaworld": "simulation.environments.metaworld:MetaWorld",
        "pusht": "simulation.environments.pusht:PushT",
    },
    "tasks": {
        "addition": "rollouts.tasks:Addition",
        "digits": "rollouts.tasks:Digits",
        "file": "rollouts.tasks:PromptFile",
        "reasoning_gym": "rollouts.tasks:ReasoningGym",
    },
    "rewards": {
        "contains_answer": "rollouts.rewards:contains_answer",
        "exact_match": "rollouts.rewards:exact_match",
    },
}
TORCH_OPTIMIZERS: Final[dict[str, str]] = {
    "adadelta": "adadelta:Adadelta", "adafactor": "_adafactor:Adafactor", "adagrad": "adagrad:Adagrad",
    "adam": "adam:Adam", "adamax": "adamax:Adamax", "adamw": "adamw:AdamW", "asgd": "asgd:ASGD",
    "muon": "_muon:Muon", "nadam": "nadam:NAdam", "radam": "radam:RAdam", "rmsprop": "rmsprop:RMSprop",
    "rprop": "rprop:Rprop", "sgd": "sgd:SGD", "sparseadam": "sparse_adam:SparseAdam",
}
"""Under `torch.optim`."""
# fmt: on
