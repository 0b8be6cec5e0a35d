#pragma once
// How the groups of a plan belong together. Pure functions of the plan; all of
// them REQUIRE placements on groups that exist.

#include <span>
#include <string>
#include <vector>

#include "planner/ir/graph.h"
#include "planner/plan/plan.h"
#include "planner/schedule/pipeline_schedule.h"

namespace tessera {

// Pipeline stages. Groups are of one stage when they have nodes of one block
// or share a device, directly or through other groups: a stage runs a block's
// nodes on several groups, one after another where they share devices, at the
// same time where they do not (SOAP's O; Jia et al. 2019). Stages are numbered
// in the order of their first groups; most have one group.
struct Stages {
  std::vector<std::vector<GroupId>> groups;  // by stage, ascending
  std::vector<int> of_group;                 // by group
  std::vector<int> of_block;                 // by block; -1: without nodes

  int count() const { return static_cast<int>(groups.size()); }
};
Stages StagesOf(const Graph& graph, const Plan& plan);

// Its stages, the chunks that its stages have, and its microbatches.
PipelineShape ShapeOf(const Graph& graph, const Plan& plan);
// REQUIRES: the plan's schedule is valid.
StageOrders OrdersOf(const Graph& graph, const Plan& plan);

// For each group the others that share a device with it, ascending: a device
// computes for one group at a time.
std::vector<std::vector<GroupId>> Overlaps(std::span<const DeviceGroup> groups);

// All devices of a plan, each once, by first appearance; one axis.
DeviceGroup World(const Plan& plan);

// Devices that belong to the same groups, and so hold the same kinds of
// buffers. Of a plan whose groups share no device these are its groups.
struct DeviceSet {
  std::string name;             // "a", "a + b": of the groups
  std::vector<GroupId> groups;  // ascending
  std::vector<DeviceId> devices;
};
bool Holds(const DeviceSet& set, GroupId group);
// Every device once, in the order of the groups and then of their devices.
std::vector<DeviceSet> DeviceSets(std::span<const DeviceGroup> groups);

}  // namespace tessera
