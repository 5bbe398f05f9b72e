from omegaconf import OmegaConf

from etude.types import create_dummy_batch

from .my_trainer import MyCustomTrainer


def test_custom_trainer_prepare_batch():
    config = OmegaConf.create({
        "algorithm": {"my_param": 0.5},
        "train_service": {"world_size": 1, "backend": "self-hosted", "url": "http://localhost"}
    })  # fmt: skip

    trainer = MyCustomTrainer(config)

    # Create dummy batch
    batch = create_dummy_batch()

    # Test _prepare_batch
    prepared_batch, metrics = trainer._prepare_batch(batch)

    assert "advantages" in prepared_batch.values
    assert "advantage_mean" in metrics
