#pragma once
// The tables of what constraints may say: the keys that operators are held to,
// what plans are kept from, and named parts of the space. Functions without
// state; thread-safe.

#include <array>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "planner/plan/graph_index.h"
#include "planner/plan/plan.h"

namespace tessera {

// What an operator may be held to.
struct FixKey {
  std::string_view name;
  std::string_view summary;
};
std::span<const FixKey> FixKeys();

// What a plan may be kept from.
struct ForbiddenRow {
  std::string_view name;
  std::string_view summary;
  // Of any of its nodes, of any of its weights, of the plan's stages, or of the
  // nodes of any of its blocks together; null: of none.
  bool (*node)(const GraphIndex& index, const Plan& plan, NodeId node);
  bool (*weight)(const WeightPlacement& weight) = nullptr;
  bool (*stages)(const GraphIndex& index, const Plan& plan) = nullptr;
  bool (*block)(const GraphIndex& index, const Plan& plan, int block) = nullptr;
};
std::span<const ForbiddenRow> Forbidden();

// Whether a plan has it.
bool Has(const ForbiddenRow& row, const GraphIndex& index, const Plan& plan);

// Named parts of the space.
struct Subspace {
  std::string_view name;
  std::string_view summary;
  bool (*holds)(const GraphIndex& index, const Cluster& cluster,
                const Plan& plan);
  // Of Forbidden(), those that it never has, and no operator has.
  std::vector<std::string_view> lacks = {};
};
std::span<const Subspace> Subspaces();

// How plans are held to a key.
struct HeldRow {
  FixKey key;
  std::string_view lacking;  // what operators must be or have, for an error
  // Of the matching nodes of a block those that are to have the value, by the
  // first of these that finds some in any block; null: there is no other.
  using Finder = std::vector<NodeId> (*)(const GraphIndex& index,
                                         const std::vector<NodeId>& nodes,
                                         int value);
  std::array<Finder, 4> finders;
  // Whether all of `nodes` have it.
  bool (*holds)(const GraphIndex& index, const Plan& plan,
                const std::vector<NodeId>& nodes, int value);
  // The row of Forbidden() that a plan with it has, or empty.
  std::string (*needs)(int value);
  // Of which nodes that row asks; null: of all. Subspaces ask of all.
  bool (*asked)(const Node& node) = nullptr;
  // A number of ways, of which a node has as many as their product.
  bool is_ways = false;
};
// In the order of FixKeys().
std::span<const HeldRow> HeldRows();

// Samples of a microbatch that the rank with most has of a node.
int64_t MostSamples(const GraphIndex& index, const Plan& plan, NodeId node);

// Matrix products and attention.
bool IsDense(const Node& node);

}  // namespace tessera
