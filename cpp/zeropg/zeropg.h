// zeropg for C++ programs: a process group, and modules sharded over it. No Python.
#pragma once

#include <zeropg/fully_sharded_module.h>
#include <zeropg/process_group.h>
#include <zeropg/sharded_optimizer.h>
