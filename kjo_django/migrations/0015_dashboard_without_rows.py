from django.db import migrations


class Migration(migrations.Migration):
    dependencies = [("kjo_django", "0014_windows_of_rates")]

    operations = [
        migrations.AlterModelOptions(
            name="dashboard",
            options={
                "base_manager_name": "objects",
                "default_permissions": (),
                "managed": False,
                "permissions": (("view_dashboard", "Can see the dashboard"),),
                "verbose_name": "dashboard",
                "verbose_name_plural": "dashboard",
            },
        ),
    ]
