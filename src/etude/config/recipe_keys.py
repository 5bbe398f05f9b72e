"""Keys of recipes: those that are carried over as they are, and those that are refused, with what to write instead."""

from __future__ import annotations

from typing import Final

MODES: Final = ("self-hosted", "training-service")
BACKENDS: Final = {
    "self-hosted": "self-hosted", "direct-zmq": "self-hosted", "tinker": "training-service",
    "weaver": "training-service",
}  # fmt: skip
"""The mode that each backend of a training service belongs to."""
TRAINERS: Final = (
    "self_hosted_grpo", "self_hosted_cross_entropy", "self_hosted_opd", "remote_api_grpo", "remote_api_cross_entropy",
    "remote_api_opd",
)  # fmt: skip
"""Trainers that need no file of one's own."""
AT_TOP: Final = ("rollout_worker", "trajectory_pool", "weight", "service", "launch_mode", "runtime_monitor")
IN_TRAINER: Final = (
    "total_train_steps", "custom_trainer_module_path", "custom_trainer_class_name", "train_service", "algorithm",
    "save_freq", "checkpoint_path", "sync_weight_path", "remove_previous_ckpt", "teachers",
)  # fmt: skip
"""What makes a file a recipe: one of these keys at its top, or in its trainer."""

SERVICE: Final = ("backend", "url", "world_size", "identifier", "role", "resource", "config")
"""Keys of one training service; a mapping without any of them holds services by name."""
SERVICE_CONFIG: Final = (
    "loss_fn", "entropy_coeff", "kl_penalty_coef", "kl_discount_factor", "clip_low_threshold", "clip_high_threshold",
    "beta",
)  # fmt: skip
OPTIMIZER: Final = {
    "optim.lr": "lr", "optim.weight_decay": "weight_decay", "optim.betas": "optimizer_params.betas",
    "optim.lr_warmup_steps": "warmup_steps", "grad_clip": "clip_norm", "ppo_micro_batch_size": "batch_size",
}  # fmt: skip
"""What an actor says of its optimizer -> where the training section has it."""
ADAM: Final = ("beta1", "beta2", "eps", "weight_decay", "grad_clip_norm")
ACTOR: Final = (
    "ppo_epochs", "clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c",
    "loss_agg_mode", "loss_func_type", "entropy_coeff", "use_kl_loss", "kl_loss_type", "kl_loss_coef",
    "do_old_log_prob_compute",
)  # fmt: skip
"""What the trainer itself reads of its service."""

_DRAWS = "the policy that is trained draws its completions itself; leave it out"
_CLUSTER = "is for cluster jobs; ranks are started here (train_service.world_size), or by torchrun or Ray: leave it out"
_STRATEGY = "is for another backend; to share the weights among ranks write engine: {params: {strategy: fsdp}}"
_SYNC = "weights need no transport, for who trains also draws; leave it out"

REFUSED: Final[dict[str, str]] = {
    "multi_model": "one run trains one model; write a recipe for each",
    "logger.enable_feishu_logging": "there is no such logger; use wandb, mlflow, trackio or tensorboard",
    "logger.feishu_url": "there is no such logger; use wandb, mlflow, trackio or tensorboard",
    "environment.setup_script": "nothing is run on other machines; run the script before etude",
    "environment.require_setup_script": "nothing is run on other machines; run the script before etude",
    "rollout_worker.num_workers": "completions are drawn side by side; policy.params.max_rows says how many at once",
    "rollout_worker.resource": "completions are drawn side by side; policy.params.max_rows says how many at once",
    "rollout_worker.agent": "give a reward: rollout_worker.reward_module_path: file.py:function",
    "rollout_worker.nexau_agent_config_path": "give an agent of your own: rollout_worker.agent_cls: file.py:Class",
    "rollout_worker.nexau_agent_workspace": "give an agent of your own: rollout_worker.agent_cls: file.py:Class",
    "rollout_worker.task_name": "runs are named by experiment_name, or by -t; leave it out",
    "rollout_worker.trace_path": "the report of the run shows what was written; leave it out",
    "rollout_worker.save_trace": "the report of the run shows what was written; leave it out",
    "trainer.sync_weight_path": _SYNC,
    "weight.sync_weight_path": _SYNC,
    "validate.validate_before_train": "the first validation comes after validate_freq steps; leave it out",
    "service.inference_service.api_key": _DRAWS,
    "service.inference_service.base_url": _DRAWS,
    "service.inference_service.max_retries": _DRAWS,
    "service.inference_service.weight_type": "write policy: {params: {dtype: bfloat16}}",
    "service.inference_service.tool_parser": "an agent reads tool calls itself: rollout_worker.agent_cls",
    "service.inference_service.reasoning_parser": "an agent reads what was written itself: rollout_worker.agent_cls",
    "service.inference_service.resource": _CLUSTER,
    "runtime_monitor": "an error ends a run and says where; rollouts.on_error is for rollouts that fail",
    "debug": "the report of the run shows rollouts and metrics; leave it out",
}
"""Dotted key -> why it is refused, and what to write instead. Null and false ask for nothing, and pass."""
REFUSED_OF_SERVICE: Final[dict[str, str]] = {
    "resource.memory_per_gpu": _CLUSTER,
    "actor.checkpoint_manager": "checkpoints are one kind: trainer.save_freq says how often; leave it out",
    "actor.model.use_remove_padding": "rows are padded no further than the longest of their batch; leave it out",
    "actor.ulysses_sequence_parallel_size": _STRATEGY,
    "actor.use_dynamic_bsz": "say how many rows are computed at a time: ppo_micro_batch_size",
    "actor.ppo_max_token_len_per_gpu": "say how many rows are computed at a time: ppo_micro_batch_size",
    "actor.fsdp_config": _STRATEGY,
    "actor.ref": "the reference policy is made from the model itself where the algorithm asks for one; leave it out",
    "actor.rollout": _DRAWS,
}
"""The same for each training service."""
