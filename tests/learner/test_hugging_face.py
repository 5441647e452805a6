"""Models of Hugging Face's transformers as they are: tokenised batches in, one of their outputs out."""

from __future__ import annotations

import pytest
import torch
from checks import quietly

import evcl

transformers = pytest.importorskip("transformers", reason="needs the package transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

SMALL = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
SMALL |= {"intermediate_size": 32, "max_position_embeddings": 32}


def model(kind="BertModel", **options):
    config = transformers.RobertaConfig if kind.startswith("Roberta") else transformers.BertConfig
    return quietly(lambda: getattr(transformers, kind)(config(**SMALL, **options))).eval()


def sentences(n=40, seed=0, pad=0):
    """Token numbers of different lengths, and a tokenised batch of them."""
    source, y = torch.Generator().manual_seed(seed), [i % 2 for i in range(n)]
    rows = []
    for label in y:
        words = torch.randint(3, 20, (int(torch.randint(3, 9, (1,), generator=source)),), generator=source)
        rows.append([1, *(words + 17 * label).tolist(), 2])
    longest = max(map(len, rows))
    ids = torch.tensor([row + [pad] * (longest - len(row)) for row in rows])
    mask = (torch.arange(longest) < torch.tensor([len(row) for row in rows])[:, None]).long()
    return rows, y, transformers.BatchEncoding({"input_ids": ids, "attention_mask": mask, "labels": torch.tensor(y)})


def learner_of(network, **options):
    return evcl.EVCL(network, **{"prior": "network", "epochs": 15, "batch_size": 8, "lr": 0.003, **options})


@pytest.mark.parametrize("kind", ["BertModel", "BertForSequenceClassification", "RobertaModel"])
def test_a_model_learns_two_tasks_as_it_is(kind, tmp_path):
    network = model(kind)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    learner = learner_of(network)
    rows, _, batch = sentences(pad=network.config.pad_token_id)
    learner.learn(batch, task="first")
    more, other, _ = sentences(seed=1)
    learner.learn((more, other), task="second")  # lists, without a mask
    assert learner.measure(batch, task="first").accuracy > 0.9
    assert learner.measure((more, other), task="second").accuracy > 0.9
    p = learner.predict_proba(batch, task="first")
    torch.testing.assert_close(p.numpy(), learner.predict_proba(rows, task="first"), rtol=1e-4, atol=1e-5)
    alone = learner.predict_proba([rows[0]], task="first")
    torch.testing.assert_close(p[:1].numpy(), alone, rtol=1e-4, atol=1e-5)
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())
    learner.save(tmp_path / "model.safetensors")
    loaded = evcl.load(tmp_path / "model.safetensors", model(kind))
    assert torch.equal(loaded.predict_proba(batch, task="first"), p)
    names = {name for name, _ in network.named_parameters()}
    assert set(learner.state.run.network.trunk_names) <= names
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    assert learner.mean_network("first")(**inputs).shape == (40, 2)


def test_a_classifier_is_used_without_its_last_layer_unless_an_output_is_chosen():
    _, _, batch = sentences()
    network = model("BertForSequenceClassification", num_labels=3)
    features, logits = learner_of(network, epochs=1), learner_of(network, epochs=1, output="logits")
    for learner in (features, logits):
        learner.learn(batch)
    assert features.mean_network()[1].in_features == 16
    assert "classifier.weight" not in features.state.run.network.trunk_names
    assert logits.mean_network()[1].in_features == 3
    assert network.classifier.out_features == 3


def test_the_states_of_a_sequence_are_averaged_over_the_steps_that_are_there():
    _, _, batch = sentences()
    network = model()
    learner = learner_of(network, output="last_hidden_state", only=[], epochs=1)
    learner.learn(batch)
    plain = learner.mean_network()
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    mask = batch["attention_mask"].unsqueeze(2)
    with torch.no_grad():
        states = network(**inputs).last_hidden_state
        wanted = plain[1]((states * mask).sum(1) / mask.sum(1))
        torch.testing.assert_close(plain(**inputs), wanted)


def test_a_data_set_of_rows():
    datasets = pytest.importorskip("datasets", reason="needs the package datasets")
    rows, y, _ = sentences()
    about = {"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows], "text": ["words"] * 40, "label": y}
    whole, learner = learner_of(model(), epochs=1), learner_of(model(), epochs=1)
    learner.learn(datasets.Dataset.from_dict(about))
    whole.learn((rows, y))
    torch.testing.assert_close(learner.state.run.network.posterior.mean, whole.state.run.network.posterior.mean)
