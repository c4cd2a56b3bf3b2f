// One binary that is each part of Kubernetes, chosen by its first argument: one link instead of six.
package main

import (
	"context"
	"fmt"
	"os"

	"github.com/spf13/cobra"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/logs/json/register"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllermanager "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	proxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

var parts = map[string]func() *cobra.Command{
	"etcd":                    etcdCommand,
	"forward":                 forwardCommand,
	"kube-apiserver":          apiserver.NewAPIServerCommand,
	"kube-controller-manager": controllermanager.NewControllerManagerCommand,
	"kube-proxy":              proxy.NewProxyCommand,
	"kube-scheduler":          func() *cobra.Command { return scheduler.NewSchedulerCommand() },
	"kubelet":                 func() *cobra.Command { return kubelet.NewKubeletCommand(context.Background()) },
}

func main() {
	if len(os.Args) < 2 || parts[os.Args[1]] == nil {
		fmt.Fprintln(os.Stderr, "usage: kubernetes etcd|forward|kube-apiserver|kube-controller-manager|kube-proxy|kube-scheduler|kubelet [FLAG...]")
		os.Exit(2)
	}
	name := os.Args[1]
	// The parts read os.Args themselves (kubelet parses its flags by hand).
	os.Args = append([]string{name}, os.Args[2:]...)
	os.Exit(cli.Run(parts[name]()))
}
