"""How likely fixed texts, which are no task's, still are to the policy: what it loses beside what it is trained on.

Training on a swarm's groups can spoil a model in ways that no reward shows: it may forget how language goes, or learn
a stranger's. The mean log-prob of the same plain sentences tells the coarse part of that at the cost of one forward
pass. The sentences are part of the measure: others make values incomparable, also with those of earlier checkpoints.
"""

import math
from typing import Final

import torch

from sapo_node import workers
from sapo_node.training.base import TextScore
from sapo_node.training.logprobs import token_logprobs
from sapo_node.training.packing import Piece, micro_batches, pad
from sapo_node.training.policy import Policy

MAX_TOKENS: Final = 48  # of a sentence; enough for all of them in a usual tokenizer, and a bound for a byte-wise one
BATCH_TOKENS: Final = 2048  # padding counted: a large model's forward pass without gradients, small beside a step
BATCH_SECONDS: Final = 600.0  # longest forward pass, as the trainer's

TEXTS: Final = (
    "The old bridge was closed after the river rose in spring.",
    "She left the letter on the kitchen table and went for a walk.",
    "Most of the village had gone to the market by the sea.",
    "A light rain fell over the fields while the cattle slept.",
    "He could not remember where he had put the keys to the cellar.",
    "The library stays open late during the weeks before the exams.",
    "Bread tastes best when it is still warm from the oven.",
    "The children built a small boat out of bark and string.",
    "Nobody noticed that the clock in the hall had stopped.",
    "Our neighbours keep bees behind the garden wall.",
    "The train to the coast was late again because of snow.",
    "Her grandmother taught her how to mend fishing nets.",
    "A stray cat sleeps on the roof of the bakery every morning.",
    "The painter mixed a green that was darker than the forest.",
    "They decided to repair the fence before winter came.",
    "The museum bought a letter that the poet had never sent.",
    "You should let the tea stand for a while before you drink it.",
    "The wind turned in the evening and carried the smell of smoke.",
    "It took the whole summer to restore the piano.",
    "The doctor listened for a long time before she spoke.",
    "Swallows return to the same barn year after year.",
    "The path along the cliff is dangerous in the fog.",
    "He wrote his speech on the back of an envelope.",
    "The orchestra rehearsed the slow movement until midnight.",
    "Coal was once carried down this valley by mules.",
    "A good knife has to be sharpened often and used with care.",
    "The farmer sold his last horse and bought a tractor.",
    "In the attic we found a trunk full of costumes.",
    "The judge asked the witness to describe the room again.",
    "Salt was so precious here that it was locked away.",
    "The gardener covered the roses with straw against the frost.",
    "Few people know that the tower leans towards the square.",
    "The ferry brings newspapers to the island in the afternoon.",
    "My brother plays the trumpet in a band of firemen.",
    "The soup needs more pepper and a little lemon.",
    "After the concert they walked home along the canal.",
    "The lamp flickered and then the whole street went dark.",
    "The teacher read the story aloud in a quiet voice.",
    "Moss had grown over the names on the stones.",
    "A strong swimmer could cross the lake before breakfast.",
    "The mayor promised to plant trees along the main road.",
    "She keeps the seeds of the best tomatoes for next year.",
    "The ship waited outside the harbour for the tide.",
    "He learned to cook from his uncle, who had been a sailor.",
    "The windows of the chapel are made of blue glass.",
    "The dog would not come in until the thunder was over.",
    "They argued about the film all the way to the station.",
    "The carpenter chose a plank of oak without any knots.",
    "Wolves have been seen again in the northern woods.",
    "The nurse opened the curtains and let in the sun.",
    "A map of the old town hangs behind the counter.",
    "The shoemaker closed his shop when his eyes grew weak.",
    "Heavy trucks are not allowed on the mountain road.",
    "The choir sang outside because the church was full.",
    "She had never seen the desert before that journey.",
    "The cheese ripens in a cave beneath the monastery.",
    "Please close the gate so that the sheep stay inside.",
    "The pilot described the coast as a line of silver.",
    "An owl lives in the ruins above the mill.",
    "The tailor remembered every coat that he had ever made.",
    "The students painted the wall with scenes from the harbour.",
    "Without the ice the fishermen could not keep their catch.",
    "The actor forgot his line and smiled at the audience.",
    "At the end of the harvest everybody danced in the barn.",
)


@torch.no_grad()
def score_texts(policy: Policy) -> TextScore:
    """Mean log-prob a token, at temperature 1, of TEXTS under the policy; each one's first token is given."""
    tokenized = [policy.tokenizer.encode(text, add_special_tokens=False)[:MAX_TOKENS] for text in TEXTS]
    longest = max(2, policy.max_length)
    pieces = [Piece(ids[:1], [ids[1:longest]], [i]) for i, ids in enumerate(tokenized) if len(ids) > 1]
    total, tokens = 0.0, 0
    for batch in micro_batches(pieces, BATCH_TOKENS, packed=False):
        workers.stage("scoring texts", deadline=BATCH_SECONDS)
        logprobs_N, _ = token_logprobs(policy.model, pad(batch, policy.device), 1.0, policy.split_head)
        total += float(logprobs_N.sum())
        tokens += logprobs_N.numel()
    return TextScore(mean_logprob=total / max(1, tokens), chance=-math.log(len(policy.tokenizer)), tokens=tokens)
