"""Fine-tune adapters with TRL's SFTTrainer, their state and the frozen weights offloaded: python examples/trl_sft.py

Needs pip install -c constraints.txt '.[trl]'; no GPU and no network. Model, words and text are made up here.
"""

import tempfile

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import hostward
from hostward.integrations.transformers import offloading

vocabulary = {word: number for number, word in enumerate(["<pad>", "</s>", *(f"w{i}" for i in range(254))])}
words = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="</s>")
text = [{"text": " ".join(f"w{(i * 7 + j) % 254}" for j in range(20))} for i in range(16)]
config = LlamaConfig(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    vocab_size=256,
    max_position_embeddings=64,
)

with tempfile.TemporaryDirectory() as folder:
    args = SFTConfig(
        folder,
        max_steps=4,
        per_device_train_batch_size=2,
        learning_rate=1e-3,
        logging_steps=1,
        bf16=False,
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
    )
    # The one line: SFTTrainer(...) becomes offloading(SFTTrainer, ...)(...).
    trainer = offloading(SFTTrainer, offload_fraction=1.0, weights=hostward.Weights(num_layers=2, min_elements=0))(
        model=LlamaForCausalLM(config),
        args=args,
        train_dataset=Dataset.from_list(text),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=8, target_modules=["q_proj", "v_proj"]),
    )
    trainer.train()
print(trainer.optimizer)
