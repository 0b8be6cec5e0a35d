#pragma once
// Small models of odd sizes, transformers, convolutional and recurrent
// networks, for tests that draw models at random.

#include <cstdint>

#include "planner/base/rng.h"
#include "planner/ir/graph.h"

namespace tessera {

// A model as a few whole numbers, so that it can be printed, read back and made
// smaller number by number. Extents are those of planner/io/transformer.h.
struct GraphSpec {
  int layers = 1;  // 0: an embedding and a head
  // What follows the residual stream in a layer: 0 attention, then MLP; 1 both
  // beside each other, each with a norm (GPT-NeoX); 2 attention and two unlike
  // MLPs on one norm.
  int residual = 0;
  int rms = 0;      // 1: RMS norm; 0: layer norm
  int gated = 0;    // 1: a gated MLP (Llama); 0: two layers and GELU (GPT-2)
  int experts = 0;  // of the (first) MLP of each layer; 0: no experts
  int top_k = 1;    // of each token, at most `experts`
  int drops = 0;    // 1: experts have room for balanced choices only
  int balance = 0;  // 1: an auxiliary loss in each layer
  int sigmoid = 0;  // 1: scores of experts are sigmoids; 0: a softmax
  int routing_groups = 1;  // of experts, where they divide; one is chosen
  int shared = 0;          // 1: an MLP for all tokens beside the experts
  int rotary = 0;          // 1: rotary positions; 0: a learned table
  int tied = 0;            // 1: the head reads the embedding's table
  int bias = 0;            // 1: of the layers' dense operators
  int dropout = 0;         // 1: behind the embedding and every branch
  int window = 0;          // of attention; 0: none
  int alibi = 0;           // 1: scores of attention are biased by distance
  int bidirectional = 0;   // 1: attention without a causal mask
  int relative = 0;        // 1: learned biases by distance, without a window
  // Layers in front, of sequences longer by one and padded, whose result every
  // layer reads by cross attention.
  int encoder = 0;
  // Multi-head latent attention instead: 1: keys and values from latents; 2:
  // queries, too. Without window and grouped heads, always rotary.
  int latent = 0;
  int groups = 1;  // key/value heads
  int per_group = 1;
  int head_size = 2;  // even
  int hidden = 2;
  int inner = 2;
  int vocabulary = 2;
  int sequence = 1;
  int batch = 1;
  // 1: a convolutional network; 2: one with batch norms, in BatchNormGroups,
  // which keep running averages unless `shared` is 1. Then the sequence is the
  // height and width of the images, `hidden` the channels between layers,
  // `inner` those inside of them, `residual` says what a layer has (0 and 1:
  // two convolutions, or three in `groups`; 2: branches) and `gated` whether
  // its window moves by two. 3: tokens again, and layers of general
  // operators: a norm and attention written out, places taken and put back,
  // choices by comparisons and by ids; `balance` adds losses of elements.
  int image = 0;
  // 1: a recurrent language model of LSTMs, 2: of GRUs, 3: one label a
  // sequence, 4: an encoder of sequences longer by one and a decoder with
  // attention. Then `hidden` is the state's size, `inner` the embedding's, and
  // `per_group` says how many steps make a block.
  int recurrent = 0;
  // 1: the first general layer is one of signals, the features of the
  // sequence's places: convolved, pooled, made longer again by a transposed
  // convolution and by resampling.
  int signals = 0;
  bool operator==(const GraphSpec&) const = default;
};

// 1, 2 or 4: of each microbatch's samples, as `top_k` and `routing_groups` say
// where the batch has so many.
int64_t BatchNormGroups(const GraphSpec& spec);

GraphSpec RandomGraphSpec(Rng& rng);

// The model in fp64, with its backward pass.
Graph MakeGraph(const GraphSpec& spec, DType dtype = DType::kFloat64);

}  // namespace tessera
