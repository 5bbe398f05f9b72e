"""The components that come with Etude, by registry and key, as `module:attribute` under `etude`."""

from __future__ import annotations

from typing import Final

# fmt: off
BUILTINS: Final[dict[str, dict[str, str]]] = {
    "policies": {
        "act": "policies.act:ACT",
        "actor_critic": "policies.actor_critic:ActorCritic",
        "components": "policies.components:ComponentPolicy",
        "diffusion": "policies.diffusion:Diffusion",
        "flow": "policies.flow:FlowMatching",
        "language": "policies.language.build:language_model",
        "mlp": "policies.mlp:MLP",
        "residual": "policies.residual:ResidualPolicy",
        "soft_actor_critic": "policies.soft_actor_critic:SoftActorCritic",
    },
    "data": {
        "digits": "data.digits:Digits",
        "environment_rollouts": "rollouts.explore:EnvironmentRollouts",
        "episodic_dataset_factory": "data.episodic:EpisodicDatasetFactory",
        "lerobot": "data.module:LeRobotDataModule",
        "lerobot_dataset_factory": "data.lerobot.factory:LeRobotDatasetFactory",
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
        "rlpd": "algorithms.rlpd:RLPD",
        "sapo": "algorithms.grpo:SAPO",
        "sft": "algorithms.sft:SFT",
        "simpo": "algorithms.preference:SimPO",
    },
    "losses": {
        "l2_loss": "algorithms.component_losses:L2Loss",
        "load_balancing": "algorithms.component_losses:LoadBalancing",
        "router_z_loss": "algorithms.component_losses:RouterZLoss",
        "sinkhorn_knopp": "algorithms.component_losses:SinkhornKnopp",
    },
    "optimizers": {
        "adamw_cosine_schedule": "loop.component_optimizers:AdamWOneCycle",
        "adamw_warmup_cosine_decay": "loop.component_optimizers:AdamWWarmupCosineDecay",
        "schedule_free_radam": "loop.component_optimizers:ScheduleFreeRAdam",
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
    "agents": {
        "tools": "rollouts.tools:ToolAgent",
    },
    "rewards": {
        "contains_answer": "rollouts.rewards:contains_answer",
        "exact_match": "rollouts.rewards:exact_match",
    },
    "generators": {
        "endpoint": "rollouts.endpoint:CompletionEndpoint",
    },
    "robots": {
        "simulated": "deploy.simulated:SimulatedRobot",
    },
    "trainers": {
        "cfg_vqvae_flow_matching_trainer": "algorithms.components.guided:GuidedCodeFlow",
        "mutual_information_estimator_trainer": "algorithms.components.information:MutualInformation",
        "naive_flow_matching_policy_trainer": "algorithms.components.naive:NaiveFlowMatching",
        "service": "service.hold:ServiceTrainer",
        "trainer": "trainer:Trainer",
        "variational_flow_matching_policy_trainer": "algorithms.components.mixture:VariationalFlow",
        "vfp_single_expert_trainer": "algorithms.components.single_expert:SingleExpertFlow",
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
