#pragma once
// The figures behind the presets: three tables with the source of every number.

#include <span>
#include <string_view>

#include "planner/ir/cluster.h"

namespace tessera {

std::span<const DeviceType> DeviceTypes();
std::span<const LinkType> LinkTypes();

// The least time of a kernel, DeviceType::launch_overhead of the table's GPUs:
// the fastest 1 % of the 16-bit matrix products in NVIDIA aiconfigurator's
// tables take 1.8 (B200), 2.7 (H100), 3.1 (A100) us. Ada: as Hopper. Before
// Ampere: no table, as Ampere's.
Duration KernelFloor(GpuGeneration generation);

// A node's memory and storage by the name of its preset. REQUIRES: the table
// has it.
const Host& HostOf(std::string_view name);

// REQUIRES: the table has it.
const DeviceType& DeviceTypeNamed(std::string_view name);
const LinkType& LinkTypeNamed(std::string_view name);

// Gb/s of one NIC of a network as its name says; what is reached is its
// bandwidth. REQUIRES: the table has `link`, which joins nodes.
double NominalGigabits(std::string_view link);

// What tensors can use of a GPU's whole memory.
Bytes UsableMemory(Bytes whole);

// The index in `cluster` of the type called `name`, which is copied from the
// tables at its first use. REQUIRES: the tables have `name`.
int UseDeviceType(Cluster& cluster, std::string_view name);
int UseLinkType(Cluster& cluster, std::string_view name);
// That of a type which equals `type`, added where there is none.
int UseDeviceType(Cluster& cluster, const DeviceType& type);
int UseLinkType(Cluster& cluster, const LinkType& type);

}  // namespace tessera
